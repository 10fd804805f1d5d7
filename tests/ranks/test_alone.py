"""Forwards that only some ranks run: correct, or an error, but never a mixture of two ranks'
weights.

Each script trains in between, and its losses and evaluations are compared with a plain model that
has seen the same batches.
"""

from __future__ import annotations

import contextlib
import copy
import time

import pytest
import torch
import torch.distributed as dist
from compare import differences
from models import COMBINATIONS, loss_of, make
from scenarios import Wide, built, floats, learn, message_of, whole
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP

SHARDED = [c for c in COMBINATIONS if c[0] != "no_shard"]
OVER_SHM = [c for c in SHARDED if c[1] == "shm"]
OVER_C10D = [c for c in SHARDED if c[1] == "c10d"]
GATHERED = [c for c in OVER_C10D if c[0] != "zero1"]  # its forwards need no exchange
STEPS = 3
LR = 0.1


def model_of(combination, timeout=10):
    model = built(combination, timeout=timeout)
    return model, torch.optim.SGD(model.parameters(), lr=LR)


@contextlib.contextmanager
def swapped(model, factor=0.5):
    """Swapped weights, as those of a moving average, without a trace."""
    kept = [param.detach().clone() for param in model.parameters()]
    for param in model.parameters():
        param.data.copy_(factor * param.data)
    try:
        yield
    finally:
        for param, value in zip(model.parameters(), kept, strict=True):
            param.data.copy_(value)


def evaluate(model):
    model.eval()
    try:
        with torch.no_grad():
            return model(floats(9)).clone()
    finally:
        model.train()


def assert_close(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


class Plain:
    """A plain model, trained on all ranks' batches."""

    def __init__(self, kind=torch.optim.SGD, lr=LR):
        self.model = make(Wide)
        self.optimizer = kind(self.model.parameters(), lr=lr)

    def backward(self, i):
        world = dist.get_world_size()
        sum(loss_of(self.model(floats(rank, i))) for rank in range(world)).div(world).backward()

    def step(self, i):
        self.optimizer.zero_grad()
        self.backward(i)
        self.optimizer.step()

    def check(self, model, factor=1.0):
        """Fail unless a model evaluates as this one does with its weights times `factor`."""
        scaled = copy.deepcopy(self.model)
        with torch.no_grad():
            for param in scaled.parameters():
                param *= factor
        assert_close(evaluate(model), evaluate(scaled))

    def check_loss(self, i, loss):
        """Fail unless this is the loss of this rank's batch of step i."""
        assert_close(loss.detach(), loss_of(self.model(floats(dist.get_rank(), i))).detach())


def rehearse(combination, between, by_hand=False):
    """Train as the plain model does; between(model, plain) runs before each step.

    by_hand: the optimizer's step is one that zshard cannot see.
    """
    model, optimizer = model_of(combination)
    plain = Plain()
    for i in range(STEPS):
        between(model, plain)
        optimizer.zero_grad()
        loss = loss_of(model(floats(dist.get_rank(), i)))
        plain.check_loss(i, loss)
        loss.backward()
        write_a_step(model) if by_hand else optimizer.step()
        plain.step(i)


def write_a_step(model):
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.data -= LR * param.grad


# --- correct --------------------------------------------------------------------------------------


def rank_0_evaluates(model, plain):
    for _ in range(2 if dist.get_rank() == 0 else 0):
        plain.check(model)


def rank_1_evaluates_longer(model, plain):
    for _ in range(2 + dist.get_rank()):
        plain.check(model)


def all_evaluate_with_others_weights(model, plain):
    for factor in (0.5, 2.0):
        with swapped(model, factor):
            plain.check(model, factor)
    plain.check(model)


def rank_0_evaluates_after_known_writes(model, plain):
    """Writes to full parameters, and a load, are not unknown changes."""
    state = whole(model)
    with FSDP.summon_full_params(model):
        for param in model.parameters():
            param.data.mul_(2)
    plain.check(model, 2.0)
    model.load_state_dict(state)
    rank_0_evaluates(model, plain)


RIGHT = [
    rank_0_evaluates,
    rank_1_evaluates_longer,
    all_evaluate_with_others_weights,
    rank_0_evaluates_after_known_writes,
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("combination", [*OVER_SHM, *GATHERED])
@pytest.mark.parametrize("between", RIGHT, ids=lambda f: f.__name__)
@on_ranks(2)
def test_lone_evaluation_while_others_train(combination, between):
    rehearse(combination, between)


@pytest.mark.parametrize("combination", SHARDED)
@pytest.mark.parametrize("by_hand", [False, True])
@on_ranks(2)
def test_swapped_weights_on_all_ranks(combination, by_hand):
    rehearse(combination, all_evaluate_with_others_weights, by_hand)


@pytest.mark.parametrize("combination", SHARDED)
@on_ranks(2)
def test_ranks_in_different_modes(combination):
    """Rank 0 has forgotten model.train(), and the script has its own collective between
    forward and backward."""
    model, optimizer = model_of(combination)
    plain = Plain()
    for i in range(STEPS):
        optimizer.zero_grad()
        model.train(dist.get_rank() != 0)
        loss = loss_of(model(floats(dist.get_rank(), i)))
        dist.all_reduce(loss.detach().clone())
        plain.check_loss(i, loss)
        loss.backward()
        optimizer.step()
        plain.step(i)


def towers():
    """Two models of one input."""
    pair = nn.ModuleList([make(Wide), make(Wide, seed=2)])
    pair.forward = lambda x: (pair[0](x), pair[1](x))
    return pair


@pytest.mark.parametrize("combination", OVER_SHM)
@on_ranks(2)
def test_step_between_two_backwards(combination):
    """Each with its own part of the model and its own optimizer; rank 0 is late."""
    model = built(combination, towers, timeout=10)
    optimizers = [torch.optim.SGD(part.parameters(), lr=LR) for part in model.module]
    for i in range(STEPS):
        outputs = model(floats(dist.get_rank(), i))
        for output, optimizer in zip(outputs, optimizers, strict=True):
            loss_of(output).backward()
            if dist.get_rank() == 0:
                time.sleep(0.1)
            optimizer.step()
            optimizer.zero_grad()


# --- errors ---------------------------------------------------------------------------------------

OTHER_WEIGHTS = (
    "changed since its last optimizer step or load",
    "have not made the same in-place writes",
)


def names_other_weights(text):
    """Return whether the text reports that ranks have other weights."""
    return any(words in text for words in OTHER_WEIGHTS)


def rank_1_swaps_longer(model, plain, wait=False):
    """Validation loaders of unequal length, with swapped weights on all ranks."""
    with swapped(model):
        for _ in range(2):
            plain.check(model, 0.5)
        if dist.get_rank() == 1:
            try:
                plain.check(model, 0.5)
            except zshard.DivergenceError as error:
                assert not wait and names_other_weights(str(error))
        if wait:
            dist.barrier()


def rank_1_swaps_longer_and_all_wait(model, plain):
    rank_1_swaps_longer(model, plain, wait=True)


@pytest.mark.parametrize("combination", OVER_SHM)
@pytest.mark.parametrize("between", [rank_1_swaps_longer, rank_1_swaps_longer_and_all_wait])
@on_ranks(2)
def test_extra_evaluation_with_swapped_weights(combination, between):
    """While the others keep them, it is right; else it may be an error."""
    rehearse(combination, between)


@pytest.mark.parametrize("combination", OVER_SHM)
@on_ranks(2)
def test_swapped_weights_on_one_rank(combination):
    """Only rank 0 has swapped weights; the others continue to train with theirs. A load repairs the
    writes."""
    model, optimizer = model_of(combination)
    state = whole(model)
    if dist.get_rank() == 0:
        with swapped(model):
            text = message_of(lambda: evaluate(model), zshard.DivergenceError)
        assert names_other_weights(text) and "alike" in text
    step = lambda: loss_of(model(floats(dist.get_rank()))).backward()  # noqa: E731
    text = message_of(step, zshard.DivergenceError)
    assert "rank 0's last was copy_() on 'second.bias'; rank 1 made none" in text
    model.load_state_dict(state)
    learn(model, optimizer, 0)
    plain = Plain()
    plain.step(0)
    plain.check(model)


@pytest.mark.parametrize("combination", OVER_SHM)
@pytest.mark.parametrize("grad", [False, True])
@on_ranks(2)
def test_evaluation_mode_and_swapped_weights(combination, grad):
    """All train in evaluation mode; rank 0 evaluates alone, with swapped weights, with or without
    gradients."""
    model, optimizer = model_of(combination, timeout=2)  # rank 1 waits for rank 0, which has ended
    model.eval()
    with pytest.raises((zshard.DivergenceError, zshard.PeerTimeoutError)) as caught:
        if dist.get_rank() == 0:
            with swapped(model), torch.set_grad_enabled(grad):
                model.train()
                model(floats(9))
                model.eval()
        loss_of(model(floats(dist.get_rank()))).backward()
        optimizer.step()
    assert dist.get_rank() == 1 or names_other_weights(str(caught.value))


@pytest.mark.parametrize("combination", [*OVER_SHM, *GATHERED])
@on_ranks(2)
def test_backward_skipped_on_one_rank_within_no_sync(combination):
    """Over c10d as under DDP: that rank has no gradients of that batch."""
    model, _ = model_of(combination)
    is_error = pytest.raises(zshard.DivergenceError)
    with is_error if combination in OVER_SHM else contextlib.nullcontext():
        with model.no_sync():
            loss = loss_of(model(floats(dist.get_rank())))
            if dist.get_rank() == 0:
                loss.backward()
        loss_of(model(floats(dist.get_rank()))).backward()


ERRORS = [*((c, True) for c in OVER_C10D), (("zero1", "c10d"), False)]


@pytest.mark.parametrize(("combination", "swaps"), ERRORS)
@on_ranks(2)
def test_lone_evaluation_over_c10d(combination, swaps):
    """Rank 0 evaluates, and then all train: an error before the step."""
    model, optimizer = model_of(combination)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises((zshard.DivergenceError, zshard.PeerTimeoutError)) as caught:
        if dist.get_rank() == 0:
            with swapped(model) if swaps else contextlib.nullcontext():
                evaluate(model)
        loss_of(model(floats(dist.get_rank()))).backward()
        optimizer.step()
    assert not swaps or "have not made the same in-place writes to shards" in str(caught.value)
    assert differences(model.parameters(), before) == []
