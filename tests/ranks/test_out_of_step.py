"""Ranks whose parameters come from different steps: an error on all of them, which a load
repairs."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from groups import own_group, passing_groups
from models import COMBINATIONS, loss_of, make
from scenarios import Stack, floats, learn, message_of, whole

import zshard
from zshard import FSDP

SHARDED = [c for c in COMBINATIONS if c[0] != "no_shard"]


def built(combination):
    """Return a model on transports of its own: a test may leave them broken."""
    strategy, transport = combination
    return FSDP(
        make(Stack), process_group=own_group(), strategy=strategy, transport=transport, timeout=10
    )


@passing_groups()
def one_rank_does(combination, what):
    """Return the error of the next forward, after rank 0 alone has done something; then all
    load."""
    model = built(combination)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learn(model, optimizer, 0)
    saved = whole(model)
    other = make(Stack, seed=7).state_dict()
    if what == "load":
        learn(model, optimizer, 1)
        if dist.get_rank() == 0:
            model.load_state_dict(saved)
    elif what == "load something else":
        model.load_state_dict(saved if dist.get_rank() == 0 else other)
    elif what == "leave out a step":
        learn(model, optimizer, 1, stepping=dist.get_rank() != 0)
    elif what == "fail after a step":
        with contextlib.suppress(LookupError):
            learn(model, Failing(optimizer, after=True), 1)
    elif what == "fail in a step":
        with contextlib.suppress(LookupError):
            learn(model, Failing(optimizer), 1)
    found = []
    for _ in range(2):
        with pytest.raises(zshard.DivergenceError) as caught:
            model(floats(0))
        found.append(str(caught.value))
    model.load_state_dict(saved)
    learn(model, optimizer, 2)
    return found, whole(model), after_a_load(saved)


class Failing:
    """An optimizer whose step raises on rank 0."""

    def __init__(self, optimizer, after=False):
        self.zero_grad = optimizer.zero_grad
        self.inner = optimizer
        self.after = after

    def step(self):
        def fail(*_):
            raise LookupError("planted")

        if dist.get_rank() == 0:
            register = self.inner.register_step_pre_hook
            if self.after:  # zshard does not learn what it has written
                register = self.inner.register_step_post_hook
            register(fail)
        try:
            self.inner.step()
        finally:
            self.inner._optimizer_step_pre_hooks.clear()
            self.inner._optimizer_step_post_hooks.clear()


def after_a_load(saved):
    """Return a plain model's state after loading, and after a step with both ranks' batches."""
    models = [make(Stack) for _ in range(2)]
    for rank, model in enumerate(models):
        model.load_state_dict(saved)
        loss_of(model(floats(rank, 2))).backward()
    with torch.no_grad():
        for a, b in zip(*(model.parameters() for model in models), strict=True):
            a -= 0.1 * (a.grad + b.grad) / 2
    return models[0].state_dict()


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "what",
    ["load", "load something else", "leave out a step", "fail in a step", "fail after a step"],
)
@pytest.mark.parametrize("combination", SHARDED)
def test_action_of_one_rank_is_an_error_on_all(pool2, combination, what):
    for found, ours, expected in pool2.run(one_rank_does, combination, what):
        for text in found:
            assert "out of step" in text and "load a checkpoint on all ranks" in text
        for name, value in expected.items():
            torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6)


@passing_groups()
def all_do(combination):
    """Loads, skipped steps, and several optimizers, the same on all ranks."""
    model = built(combination)
    first = torch.optim.SGD(list(model.parameters())[:3], lr=0.1)
    second = torch.optim.SGD(list(model.parameters())[3:], lr=0.1)
    learn(model, first, 0)
    learn(model, second, 1)
    learn(model, first, 2, stepping=False)
    saved = whole(model)
    if dist.get_rank() == 0:
        model.load_state_dict(make(Stack, seed=3).state_dict())
    model.load_state_dict(saved)  # valid again
    learn(model, first, 3)
    second.step()  # a second time after the same backward
    learn(model, second, 4)


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_same_action_on_all_ranks_is_allowed(pool2, combination):
    pool2.run(all_do, combination)


# --- what errors quote ----------------------------------------------------------------------------


def fail_before_forward(module, args):
    raise LookupError("no batch")


@passing_groups()
def error_after_a_failure(transport, failing, between):
    """Return the error after rank 0 alone has written to a model, and another one has failed before
    that."""
    group = own_group()
    failed, model = (
        FSDP(make(Stack), process_group=group, transport=transport, timeout=10) for _ in range(2)
    )
    if failing == "all ranks":
        failed.half()
        with pytest.raises(ValueError, match="changed its dtype"):
            failed(floats(0))
    elif dist.get_rank() == 0:
        failed.register_forward_pre_hook(fail_before_forward, prepend=True)
        with pytest.raises(LookupError):
            failed(floats(0))
    if between == "a backward":
        loss_of(model(floats(dist.get_rank()))).backward()
    elif between == "a new model":
        model = FSDP(make(Stack), process_group=group, transport=transport, timeout=10)
    if dist.get_rank() == 0:
        with torch.no_grad():
            model.head.weight.mul_(2.0)
    return message_of(lambda: model(floats(0)), zshard.DivergenceError)


QUOTES = [("one rank", "nothing", True), ("all ranks", "nothing", False)]
QUOTES += [
    (failing, between, False)
    for failing in ("one rank", "all ranks")
    for between in ("a backward", "a new model")
]


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize(("failing", "between", "quotes"), QUOTES)
def test_failure_of_another_model_is_quoted_only_if_it_may_be_why(
    pool2, transport, failing, between, quotes
):
    for text in pool2.run(error_after_a_failure, transport, failing, between):
        assert ("; rank 0 raised LookupError: no batch in forward" in text) == quotes
        assert text.count("raised") == quotes
        assert "rank 0's last was mul_() on 'head.weight'; rank 1 made none" in text
