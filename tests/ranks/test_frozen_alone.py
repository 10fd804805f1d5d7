"""One rank alone freezes or unfreezes: an error on all ranks, until all train the same parameters.

After the error the script sets requires_grad the same on all ranks, and trains on as under DDP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import differences
from groups import own_group, passing_groups
from models import COMBINATIONS, ddp, loss_of
from spawn import RankPool, ranks
from torch import nn

import zshard
from zshard import FSDP

Freeze = Callable[[Any, bool], None]


def model() -> Any:
    torch.manual_seed(0)
    made = nn.Sequential(*[nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)])
    made[2].requires_grad_(False)
    return made


def of_ddp() -> tuple[Any, Any]:
    """DDP reduces no gradients of parameters that were frozen when it was wrapped."""
    plain = model().requires_grad_(True)
    parallel = ddp(plain, find_unused_parameters=True)
    plain[2].requires_grad_(False)
    return plain, parallel


def one_parameter(made: Any, on: bool) -> None:
    made[1][0].bias.requires_grad_(not on)


def a_unit(made: Any, on: bool) -> None:
    made[0].requires_grad_(not on)


def unfrozen(made: Any, on: bool) -> None:
    made[2][0].weight.requires_grad_(on)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def step(made: Any, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    loss_of(made(batch(number, dist.get_rank()))).backward()
    optimizer.step()


@passing_groups()
def alone(combination: tuple[str, str], freeze: Freeze, within: str) -> list[str]:
    strategy, transport = combination
    kinds = {nn.Linear} if within != "one unit" else None
    made: Any = FSDP(
        model(),
        process_group=own_group(),
        strategy=strategy,
        transport=transport,
        auto_wrap_policy=kinds,
        timeout=30,
    )
    plain, parallel = of_ddp()
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (made, plain)]
    for number in range(2):
        step(made, optimizers[0], number)
        step(parallel, optimizers[1], number)
    if dist.get_rank() == 1:
        freeze(made, True)
    for _ in range(2):
        optimizers[0].zero_grad()
        with pytest.raises(zshard.DivergenceError) as error:
            with made.no_sync() if within == "no_sync" else contextlib.nullcontext():
                loss_of(made(batch(5, dist.get_rank()))).backward()
            loss_of(made(batch(5, dist.get_rank()))).backward()
        assert "rank 0 and rank 1 do not train the same parameters" in str(error.value)
        assert "set requires_grad on all ranks" in str(error.value)
    optimizers[0].zero_grad()
    if freeze is unfrozen:  # the others follow
        freeze(made, True)
        freeze(plain, True)
    else:
        freeze(made, False)
    step(made, optimizers[0], 2)
    step(parallel, optimizers[1], 2)
    return differences(made.state_dict(), plain.state_dict())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("within", ["units", "one unit", "no_sync"])
@pytest.mark.parametrize("freeze", [one_parameter, a_unit, unfrozen])
@pytest.mark.parametrize("combination", COMBINATIONS)
@ranks(2)
def test_freezing_on_one_rank_is_an_error_and_training_continues(
    pool: RankPool, combination: tuple[str, str], freeze: Freeze, within: str
) -> None:
    if combination[0] == "no_shard" and freeze is unfrozen:
        pytest.skip("rank 1 has a round more, for which no other comes: another DivergenceError")
    assert pool.run(alone, combination, freeze, within) == [[], []]


@passing_groups()
def toggled(combination: tuple[str, str]) -> list[str]:
    """All ranks freeze and unfreeze at each step, and one evaluates in between over shm."""
    strategy, transport = combination
    kinds = {nn.Linear}
    group = own_group()
    made: Any = FSDP(model(), group, strategy, auto_wrap_policy=kinds, transport=transport)
    plain, parallel = of_ddp()
    for number in range(4):
        for each, inner in ((made, made), (parallel, plain)):
            inner[0].requires_grad_(number % 2 == 0)
            inner[2].requires_grad_(number % 2 == 1)
            optimizer = torch.optim.SGD(inner.parameters(), 0.1)
            step(each, optimizer, number)
            optimizer.zero_grad()
        if transport == "shm" and dist.get_rank() == 0:
            made[1].requires_grad_(False)
            with torch.no_grad():
                made(batch(9, 0))
            made[1].requires_grad_(True)
    return differences(made.state_dict(), plain.state_dict())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("combination", COMBINATIONS)
@ranks(2)
def test_all_ranks_may_toggle(pool: RankPool, combination: tuple[str, str]) -> None:
    assert pool.run(toggled, combination) == [[], []]
