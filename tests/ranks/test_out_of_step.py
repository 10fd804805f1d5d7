"""Ranks whose parameters come from different steps, or that train different ones: an error on all,
until a load or requires_grad makes them equal again.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups import own_group
from models import COMBINATIONS, TRANSPORTS, loss_of, make
from scenarios import WIDTH, Stack, built, floats, learn, message_of, whole
from spawn import on_ranks
from torch import nn

import zshard

SHARDED = [c for c in COMBINATIONS if c[0] != "no_shard"]


def fail(*_):
    raise LookupError("planted")


def fail_a_step(optimizer, register):
    """Make a step that raises on rank 0."""
    if dist.get_rank() != 0:
        return optimizer.step()
    handle = register(fail)
    with pytest.raises(LookupError):
        optimizer.step()
    return handle.remove()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("what", ["load", "load something else", "fail in a step", "and after it"])
@pytest.mark.parametrize("combination", SHARDED)
@on_ranks(2)
def test_action_of_one_rank_is_an_error_on_all(combination, what):
    model = built(combination, Stack)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learn(model, optimizer, 0)
    saved = whole(model)
    learn(model, optimizer, 1, stepping=what == "load")
    if what == "load something else":
        model.load_state_dict(saved if dist.get_rank() == 0 else make(Stack, 7).state_dict())
    elif what == "fail in a step":
        fail_a_step(optimizer, optimizer.register_step_pre_hook)
    elif what == "and after it":  # zshard does not see its writes
        fail_a_step(optimizer, optimizer.register_step_post_hook)
    elif dist.get_rank() == 0:
        model.load_state_dict(saved)
    for _ in range(2):
        text = message_of(lambda: model(floats(0)), zshard.DivergenceError)
        assert "out of step" in text and "load a checkpoint on all ranks" in text
    model.load_state_dict(saved)
    learn(model, optimizer, 2)
    for name, value in after_a_load(saved).items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=1e-6)


def after_a_load(saved):
    """Return a plain model's state after loading, and after a step with both ranks' batches."""
    model = make(Stack)
    model.load_state_dict(saved)
    sum(loss_of(model(floats(rank, 2))) for rank in range(2)).div(2).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model.state_dict()


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_same_action_on_all_ranks_is_allowed(combination):
    """Loads, skipped steps, and several optimizers."""
    model = built(combination, Stack)
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


# --- what errors quote ----------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("between", ["nothing", "a backward", "a new model"])
@pytest.mark.parametrize("failing", ["one rank", "all ranks"])
@on_ranks(2)
def test_failure_of_another_model_is_quoted_only_if_it_may_be_why(transport, failing, between):
    """Rank 0 alone writes to a model; another one has failed before that."""
    combination, group = ("full_shard", transport), own_group()
    failed, model = (built(combination, Stack, process_group=group) for _ in range(2))
    if failing == "all ranks":
        failed.half()
        with pytest.raises(ValueError, match="changed its dtype"):
            failed(floats(0))
    elif dist.get_rank() == 0:
        failed.register_forward_pre_hook(fail, prepend=True)
        with pytest.raises(LookupError):
            failed(floats(0))
    if between == "a backward":
        loss_of(model(floats(dist.get_rank()))).backward()
    elif between == "a new model":
        model = built(combination, Stack, process_group=group)
    if dist.get_rank() == 0:
        with torch.no_grad():
            model.head.weight.mul_(2.0)
    text = message_of(lambda: model(floats(0)), zshard.DivergenceError)
    quotes = (failing, between) == ("one rank", "nothing")
    assert ("; rank 0 raised LookupError: planted in forward" in text) == quotes
    assert text.count("raised") == quotes
    assert "rank 0's last was mul_() on 'head.weight'; rank 1 made none" in text


# --- models and training --------------------------------------------------------------------------


def layers() -> Any:
    made = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])
    made[2].requires_grad_(False)
    return made


def one_parameter(made: Any, on: bool) -> None:
    made[1][0].bias.requires_grad_(not on)


def a_unit(made: Any, on: bool) -> None:
    made[0].requires_grad_(not on)


def unfrozen(made: Any, on: bool) -> None:
    made[2][0].weight.requires_grad_(on)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("within", ["units", "one unit", "no_sync"])
@pytest.mark.parametrize("freeze", [one_parameter, a_unit, unfrozen])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_freezing_on_one_rank_is_an_error_until_all_do(combination, freeze, within):
    """Rank 1 alone freezes or unfreezes; then all ranks do, and undo it."""
    if combination[0] == "no_shard" and freeze is unfrozen:
        return  # rank 1 has a round more, for which no other comes: another DivergenceError
    policy = {nn.Linear} if within != "one unit" else None
    model, plain = built(combination, layers, auto_wrap_policy=policy), make(layers)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, plain)]

    def step(number: int) -> None:
        learn(model, optimizers[0], number)
        optimizers[1].zero_grad()
        sum(loss_of(plain(floats(rank, number))) for rank in range(2)).div(2).backward()
        optimizers[1].step()

    def two_backwards() -> None:
        with model.no_sync() if within == "no_sync" else contextlib.nullcontext():
            loss_of(model(floats(0))).backward()
        loss_of(model(floats(0))).backward()

    step(0)
    if dist.get_rank() == 1:
        freeze(model, True)
    for _ in range(2):
        optimizers[0].zero_grad()
        text = message_of(two_backwards, zshard.DivergenceError)
        assert "rank 0 and rank 1 do not train the same parameters" in text
        assert "set requires_grad on all ranks" in text
    for number, on in enumerate((True, False), 1):
        optimizers[0].zero_grad()
        freeze(model, on)
        freeze(plain, on)
        step(number)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)
