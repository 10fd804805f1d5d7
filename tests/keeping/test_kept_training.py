"""A kept run whose ranks are killed continues as if nothing had happened: losses, norms and weights
are those of an undisturbed run, to the bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_training import STEPS, Run, kept_step, losses_in, random_kills, survived, undisturbed
from nursery import fork_ranks

import zshard
from zshard.extras.keeping.client import VARIABLE, Keeper

PLACES = ("forward", "backward", "before", "block", "after")


def check(keeper: Keeper, folder: Path, options: dict[str, Any], kills: list[Any]) -> int:
    """Compare a run with an undisturbed one; return where the last processes began."""
    expected = undisturbed(options)
    *_, found = survived(keeper, folder, options, kills)
    assert [digest for _, digest in found] == [digest for digest, _ in expected]
    for rank, (_, losses) in enumerate(expected):
        assert losses_in(folder, rank) == losses
    began = {start for start, _ in found}
    assert len(began) == 1
    return int(began.pop())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("step", [0, 1, 3, 4, STEPS - 1])
def test_a_rank_killed_in_each_phase(
    keeper: Keeper, tmp_path: Path, step: int, place: str, rank: int
) -> None:
    begins = check(keeper, tmp_path, {}, [(place, rank, step)])
    assert begins == (step + 1 if place == "after" else step)


COMBINATIONS = [
    (strategy, transport)
    for strategy in ("full_shard", "shard_grad_op", "zero1", "no_shard")
    for transport in ("shm", "c10d")
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("strategy", "transport"), COMBINATIONS)
@pytest.mark.parametrize(
    "optimizer",
    ["adamw", "amsgrad", "momentum", "plain sgd", "8 bit", "rounding", "two groups"],
)
def test_each_strategy_and_optimizer(
    keeper: Keeper, tmp_path: Path, optimizer: str, strategy: str, transport: str
) -> None:
    options = {"optimizer": optimizer, "strategy": strategy, "transport": transport}
    check(keeper, tmp_path, options, [("block", 1, 5)])


def test_mixed_precision_and_units(keeper: Keeper, tmp_path: Path) -> None:
    check(keeper, tmp_path, {"precision": torch.bfloat16, "units": True}, [("block", 0, 5)])


@pytest.mark.parametrize("optimizer", ["adamw", "8 bit"])
def test_copies_of_the_model_change_nothing(keeper: Keeper, tmp_path: Path, optimizer: str) -> None:
    options = {"optimizer": optimizer, "copy": True, "units": True}
    check(keeper, tmp_path, options, [("block", 1, 5)])


def test_failures_in_a_row(keeper: Keeper, tmp_path: Path) -> None:
    """One kill after another: in the first step after a recovery, too, and twice in one step."""
    kills = [("before", 0, 2), ("forward", 1, 2), ("block", 0, 2), ("after", 1, 2), ("block", 1, 3)]
    assert check(keeper, tmp_path, {}, kills) == 3


def test_more_ranks(keeper: Keeper, tmp_path: Path) -> None:
    check(keeper, tmp_path, {"ranks": 3}, [("block", 2, 4), ("after", 0, 5)])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard", "zero1"])
def test_two_hosts(keeper: Keeper, tmp_path: Path, strategy: str) -> None:
    options = {"ranks": 4, "transport": "hosts", "strategy": strategy}
    check(keeper, tmp_path, options, [("block", 2, 4), ("after", 1, 5)])


WIDE = {"width": 1024, "steps": 16}  # its step takes a good part of the time


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_random_kills(keeper: Keeper, tmp_path: Path, seed: int) -> None:
    check(keeper, tmp_path, WIDE, random_kills(10, 0.3, seed + 1))


def with_transposed_buffer(token: str, expected_start: int) -> None:
    """Commit a step, or recover it."""
    os.environ[VARIABLE] = token
    run, expected = Run({}), torch.arange(12.0).view(3, 4).t()
    run.model.register_buffer("table", torch.zeros(3, 4).t())
    kept = zshard.Keep(run.model, run.optimizer)
    start = kept.recover({"step": 0})["step"]
    assert start == expected_start
    if start == 0:
        run.model.table.copy_(expected)
        kept_step(run, kept)
    assert torch.equal(run.model.table, expected)


def test_a_buffer_with_strides_is_restored(token: str) -> None:
    for start in (0, 1):
        fork_ranks(with_transposed_buffer, 2, token, start, check=True)
