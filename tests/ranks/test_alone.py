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
from groups import own_group, passing_groups
from models import COMBINATIONS, loss_of, make
from scenarios import Wide, floats, learn, whole
from torch import nn

import zshard
from zshard import FSDP

SHARDED = [c for c in COMBINATIONS if c[0] != "no_shard"]
OVER_SHM = [c for c in SHARDED if c[1] == "shm"]
OVER_C10D = [c for c in SHARDED if c[1] == "c10d"]
GATHERED = [c for c in OVER_C10D if c[0] != "zero1"]  # its forwards need no exchange
STEPS = 3
LR = 0.1


def built(combination, timeout=10):
    strategy, transport = combination
    model = FSDP(
        make(Wide),
        process_group=own_group(),
        strategy=strategy,
        transport=transport,
        timeout=timeout,
    )
    return model, torch.optim.SGD(model.parameters(), lr=LR)


def by_hand(model):
    """An optimizer's step that zshard cannot see."""
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.data -= LR * param.grad


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


def evaluate(model, grad=False):
    model.eval()
    try:
        with contextlib.nullcontext() if grad else torch.no_grad():
            return model(floats(9)).detach().clone()
    finally:
        model.train()


class Plain:
    """A plain model, trained on all ranks' batches."""

    def __init__(self):
        self.models = [make(Wide) for _ in range(dist.get_world_size())]

    def step(self, i):
        for rank, model in enumerate(self.models):
            model.zero_grad()
            loss_of(model(floats(rank, i))).backward()
        with torch.no_grad():
            for params in zip(*(model.parameters() for model in self.models), strict=True):
                mean = sum(param.grad for param in params) / len(params)
                for param in params:
                    param -= LR * mean

    def evaluate(self, factor=1.0):
        model = copy.deepcopy(self.models[0])
        with torch.no_grad():
            for param in model.parameters():
                param *= factor
        return evaluate(model)

    def difference(self, i, loss):
        """Return the difference of a model's loss of a step: a list with the step and both losses,
        or an empty one."""
        own = loss_of(self.models[dist.get_rank()](floats(dist.get_rank(), i))).item()
        return [(i, loss.item(), own)] if abs(loss.item() - own) > 1e-5 else []


@passing_groups()
def rehearse(combination, between, step=None):
    """Train; between(model, plain, i) runs after each step. Return its results, and the losses that
    differ from the plain model's."""
    model, optimizer = built(combination)
    plain, found, wrong = Plain(), [], []
    for i in range(STEPS):
        found.append(between(model, plain, i))
        optimizer.zero_grad()
        loss = loss_of(model(floats(dist.get_rank(), i)))
        wrong += plain.difference(i, loss)
        loss.backward()
        (step or (lambda _: optimizer.step()))(model)
        plain.step(i)
    return found, wrong


def assert_close(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


# --- correct --------------------------------------------------------------------------------------


def rank_0_evaluates(model, plain, i):
    for _ in range(i + 1 if dist.get_rank() == 0 else 0):
        assert_close(evaluate(model), plain.evaluate())


def rank_1_evaluates_longer(model, plain, i):
    for _ in range(2 + dist.get_rank()):
        assert_close(evaluate(model), plain.evaluate())


def all_evaluate_with_others_weights(model, plain, i):
    with swapped(model):
        assert_close(evaluate(model), plain.evaluate(0.5))
    with swapped(model, 2.0):
        assert_close(evaluate(model), plain.evaluate(2.0))
    assert_close(evaluate(model), plain.evaluate())


def rank_0_evaluates_after_known_writes(model, plain, i):
    """Writes to full parameters, and a load, are not unknown changes."""
    state = whole(model)
    with FSDP.summon_full_params(model):
        for param in model.parameters():
            param.data.mul_(2)
    assert_close(evaluate(model), plain.evaluate(2.0))
    model.load_state_dict(state)
    rank_0_evaluates(model, plain, i)


RIGHT = [
    rank_0_evaluates,
    rank_1_evaluates_longer,
    all_evaluate_with_others_weights,
    rank_0_evaluates_after_known_writes,
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("combination", [*OVER_SHM, *GATHERED])
@pytest.mark.parametrize("between", RIGHT, ids=lambda f: f.__name__)
def test_lone_evaluation_while_others_train(pool2, combination, between):
    for _, wrong in pool2.run(rehearse, combination, between):
        assert wrong == []


@pytest.mark.parametrize("combination", SHARDED)
def test_swapped_weights_on_all_ranks(pool2, combination):
    for _, wrong in pool2.run(rehearse, combination, all_evaluate_with_others_weights):
        assert wrong == []


@pytest.mark.parametrize("combination", SHARDED)
def test_manual_steps_on_all_ranks(pool2, combination):
    results = pool2.run(rehearse, combination, all_evaluate_with_others_weights, by_hand)
    for _, wrong in results:
        assert wrong == []


# --- errors ---------------------------------------------------------------------------------------


def names_other_weights(text):
    """Return whether the text reports that ranks have other weights."""
    unlike = (
        "changed since its last optimizer step or load",
        "have not made the same in-place writes",
    )
    return any(words in text for words in unlike)


def rank_1_swaps_longer(model, plain, i, wait=False):
    """Validation loaders of unequal length, with swapped weights on all ranks."""
    with swapped(model):
        for _ in range(2):
            assert_close(evaluate(model), plain.evaluate(0.5))
        text = ""
        if dist.get_rank() == 1:
            try:
                assert_close(evaluate(model), plain.evaluate(0.5))
            except zshard.DivergenceError as error:
                text = str(error)
        if wait:
            dist.barrier()
        return text


def rank_1_swaps_longer_and_all_wait(model, plain, i):
    return rank_1_swaps_longer(model, plain, i, wait=True)


@pytest.mark.parametrize("combination", OVER_SHM)
def test_extra_evaluation_with_swapped_weights(pool2, combination):
    for found, wrong in pool2.run(rehearse, combination, rank_1_swaps_longer):
        assert (
            wrong == [] and [text for text in found if text and not names_other_weights(text)] == []
        )


@pytest.mark.parametrize("combination", OVER_SHM)
def test_extra_evaluation_while_others_keep_swapped_weights(pool2, combination):
    for found, wrong in pool2.run(rehearse, combination, rank_1_swaps_longer_and_all_wait):
        assert wrong == [] and found == [""] * STEPS


@passing_groups()
def rank_0_swaps(combination):
    """Only rank 0 has swapped weights; the others continue to train with theirs. Return both
    errors; a load repairs what was written."""
    model, optimizer = built(combination)
    state = whole(model)
    found = []
    if dist.get_rank() == 0:
        with swapped(model), pytest.raises(zshard.DivergenceError) as caught:
            evaluate(model)
        found.append(str(caught.value))
    with pytest.raises(zshard.DivergenceError) as caught:
        loss_of(model(floats(dist.get_rank()))).backward()
    found.append(str(caught.value))
    model.load_state_dict(state)
    learn(model, optimizer, 0)
    plain = Plain()
    plain.step(0)
    assert_close(evaluate(model), plain.evaluate())
    return found


@pytest.mark.parametrize("combination", OVER_SHM)
def test_swapped_weights_on_one_rank(pool2, combination):
    first, second = pool2.run(rank_0_swaps, combination)
    assert names_other_weights(first[0]) and "alike" in first[0]
    for said in (first[1], second[0]):
        assert "rank 0's last was copy_() on 'second.bias'; rank 1 made none" in said


@passing_groups()
def modes_differ(combination):
    """Rank 0 has forgotten model.train(), and the script has a collective of its own between
    forward and backward. Return the losses that differ from the plain model's."""
    model, optimizer = built(combination)
    plain, wrong = Plain(), []
    for i in range(STEPS):
        optimizer.zero_grad()
        model.train(dist.get_rank() != 0)
        loss = loss_of(model(floats(dist.get_rank(), i)))
        dist.all_reduce(loss.detach().clone())
        wrong += plain.difference(i, loss)
        loss.backward()
        optimizer.step()
        plain.step(i)
    return wrong


@pytest.mark.parametrize("combination", SHARDED)
def test_ranks_in_different_modes(pool2, combination):
    assert pool2.run(modes_differ, combination) == [[], []]


@passing_groups()
def eval_mode_and_other_weights(combination):
    """All train in evaluation mode; rank 0 evaluates alone, with swapped weights, with or without
    gradients. Return the errors."""
    found = []
    for grad in (False, True):
        model, optimizer = built(combination, timeout=2)  # rank 1 waits for rank 0, which has ended
        model.eval()
        try:
            if dist.get_rank() == 0:
                with swapped(model), contextlib.nullcontext() if grad else torch.no_grad():
                    model.train()
                    model(floats(9))
                    model.eval()
            loss_of(model(floats(dist.get_rank()))).backward()
            optimizer.step()
            found.append("")
        except (zshard.DivergenceError, zshard.PeerTimeoutError) as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("combination", OVER_SHM)
def test_evaluation_mode_and_swapped_weights(pool2, combination):
    first, second = pool2.run(eval_mode_and_other_weights, combination)
    for text in first:
        assert names_other_weights(text), text
    assert second[0] != "" and second[1] != ""


@passing_groups()
def skips_a_batch(combination):
    """All ranks write directly, which zshard cannot see; rank 0 skips a batch. Return the wrong
    losses."""
    model, optimizer = built(combination)
    plain, wrong = Plain(), []
    for i in range(STEPS):
        optimizer.zero_grad()
        with contextlib.suppress(LookupError):
            loss = loss_of(model(floats(dist.get_rank(), i)))
            if dist.get_rank() == 0:
                raise LookupError("a batch that is not used")
        if dist.get_rank() == 0:
            loss = loss_of(model(floats(0, i)))
        wrong += plain.difference(i, loss)
        loss.backward()
        by_hand(model)
        plain.step(i)
    return wrong


@pytest.mark.parametrize("combination", OVER_SHM)
def test_skipped_batch_and_manual_steps(pool2, combination):
    assert pool2.run(skips_a_batch, combination) == [[], []]


@passing_groups()
def two_backwards_of_one_forward(combination):
    """Each with its own part of the model and its own optimizer; rank 0 is late."""
    towers = nn.ModuleList([make(Wide), make(Wide, seed=2)])
    towers.forward = lambda x: (towers[0](x), towers[1](x))
    model = FSDP(
        towers,
        process_group=own_group(),
        strategy=combination[0],
        transport=combination[1],
        timeout=10,
    )
    optimizers = [torch.optim.SGD(part.parameters(), lr=LR) for part in towers]
    for i in range(STEPS):
        outputs = model(floats(dist.get_rank(), i))
        for output, optimizer in zip(outputs, optimizers, strict=True):
            loss_of(output).backward()
            if dist.get_rank() == 0:
                time.sleep(0.1)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("combination", OVER_SHM)
def test_step_between_two_backwards(pool2, combination):
    pool2.run(two_backwards_of_one_forward, combination)


@passing_groups()
def skips_a_backward_within_no_sync(combination):
    """Rank 1 skips a micro-batch. Return the error."""
    model, _ = built(combination)
    try:
        with model.no_sync():
            loss = loss_of(model(floats(dist.get_rank())))
            if dist.get_rank() == 0:
                loss.backward()
        loss_of(model(floats(dist.get_rank()))).backward()
    except zshard.DivergenceError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("combination", OVER_SHM)
def test_backward_skipped_on_one_rank_within_no_sync(pool2, combination):
    for said in pool2.run(skips_a_backward_within_no_sync, combination):
        assert said != ""


@pytest.mark.parametrize("combination", GATHERED)
def test_backward_skipped_on_one_rank_within_no_sync_over_c10d(pool2, combination):
    """As under DDP: that rank has no gradients of that batch."""
    assert pool2.run(skips_a_backward_within_no_sync, combination) == ["", ""]


@passing_groups()
def error_of_a_lone_evaluation(combination, swaps):
    """Return (this rank's error, whether it has made a step) where rank 0 evaluates, and then all
    train."""
    model, optimizer = built(combination)
    before = [param.detach().clone() for param in model.parameters()]
    try:
        if dist.get_rank() == 0:
            with swapped(model) if swaps else contextlib.nullcontext():
                evaluate(model)
        loss_of(model(floats(dist.get_rank()))).backward()
        optimizer.step()
    except (zshard.DivergenceError, zshard.PeerTimeoutError) as error:
        return str(error), differences(model.parameters(), before) != []
    return "", True


ERRORS = [*((c, True) for c in OVER_C10D), (("zero1", "c10d"), False)]


@pytest.mark.parametrize(("combination", "swaps"), ERRORS)
def test_lone_evaluation_over_c10d(pool2, combination, swaps):
    for text, stepped in pool2.run(error_of_a_lone_evaluation, combination, swaps):
        assert text and not stepped
        if swaps:
            assert "have not made the same in-place writes to shards" in text
