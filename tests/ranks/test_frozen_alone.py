"""One rank alone freezes or unfreezes: an error on all ranks, until all train the same parameters.

After the error the script sets requires_grad the same on all ranks, and trains on as under DDP.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import passing_groups
from models import COMBINATIONS, ddp, loss_of, make
from scenarios import built, message_of
from spawn import on_ranks
from torch import nn

import zshard


def layers() -> Any:
    made = nn.Sequential(*[nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)])
    made[2].requires_grad_(False)
    return made


def both(combination: tuple[str, str], policy: Any) -> tuple[Any, Any, Any]:
    """Return a sharded model whose last layer is frozen, the same plain model, and its DDP.

    DDP reduces no gradients of parameters that were frozen when it was wrapped.
    """
    sharded = built(combination, layers, auto_wrap_policy=policy)
    plain: Any = make(layers).requires_grad_(True)
    parallel = ddp(plain, find_unused_parameters=True)
    plain[2].requires_grad_(False)
    return sharded, plain, parallel


def one_parameter(made: Any, on: bool) -> None:
    made[1][0].bias.requires_grad_(not on)


def a_unit(made: Any, on: bool) -> None:
    made[0].requires_grad_(not on)


def unfrozen(made: Any, on: bool) -> None:
    made[2][0].weight.requires_grad_(on)


def batch(step: int) -> torch.Tensor:
    seed = 10 * step + dist.get_rank()
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))


def step(made: Any, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    loss_of(made(batch(number))).backward()
    optimizer.step()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("within", ["units", "one unit", "no_sync"])
@pytest.mark.parametrize("freeze", [one_parameter, a_unit, unfrozen])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
@passing_groups()
def test_freezing_on_one_rank_is_an_error_and_training_continues(combination, freeze, within):
    if combination[0] == "no_shard" and freeze is unfrozen:
        return  # rank 1 has a round more, for which no other comes: another DivergenceError
    made, plain, parallel = both(combination, {nn.Linear} if within != "one unit" else None)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (made, plain)]
    for number in range(2):
        step(made, optimizers[0], number)
        step(parallel, optimizers[1], number)
    if dist.get_rank() == 1:
        freeze(made, True)

    def two_backwards() -> None:
        with made.no_sync() if within == "no_sync" else contextlib.nullcontext():
            loss_of(made(batch(5))).backward()
        loss_of(made(batch(5))).backward()

    for _ in range(2):
        optimizers[0].zero_grad()
        text = message_of(two_backwards, zshard.DivergenceError)
        assert "rank 0 and rank 1 do not train the same parameters" in text
        assert "set requires_grad on all ranks" in text
    optimizers[0].zero_grad()
    freeze(made, freeze is unfrozen)  # the others follow
    if freeze is unfrozen:
        freeze(plain, True)
    step(made, optimizers[0], 2)
    step(parallel, optimizers[1], 2)
    assert_same(made.state_dict(), plain.state_dict(), "after all train the same")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
@passing_groups()
def test_all_ranks_may_toggle(combination):
    """All ranks freeze and unfreeze at each step, and one evaluates in between over shm."""
    made, plain, parallel = both(combination, {nn.Linear})
    for number in range(4):
        for each, inner in ((made, made), (parallel, plain)):
            inner[0].requires_grad_(number % 2 == 0)
            inner[2].requires_grad_(number % 2 == 1)
            optimizer = torch.optim.SGD(inner.parameters(), 0.1)
            step(each, optimizer, number)
            optimizer.zero_grad()
        if combination[1] == "shm" and dist.get_rank() == 0:
            made[1].requires_grad_(False)
            with torch.no_grad():
                made(batch(9))
            made[1].requires_grad_(True)
    assert_same(made.state_dict(), plain.state_dict(), "after four steps")
