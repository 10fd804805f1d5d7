"""A kept run whose ranks are killed, or fail otherwise, continues as if nothing had happened:
losses, norms and weights are those of an undisturbed run, bit for bit."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kept_training import (
    STEPS,
    Run,
    check,
    kept_step,
    train,
)
from nursery import fork_ranks

import zshard
from zshard.checkpoint import save as checkpoint_save
from zshard.extras.keeping.client import VARIABLE, Keeper

PLACES = ("forward", "backward", "block", "update", "after")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("step", [0, 1, 3, 4, STEPS - 1])
def test_a_rank_killed_in_each_phase(
    keeper: Keeper, tmp_path: Path, step: int, place: str, rank: int
) -> None:
    begins = check(keeper, tmp_path, {}, [(place, rank, step)])
    assert begins == (step + 1 if place in ("update", "after") else step)


OTHERS: dict[str, tuple[dict[str, Any], list[tuple[Any, ...]]]] = {  # options, and kills
    "mixed precision": ({"precision": torch.bfloat16, "units": True}, [("block", 0, 5)]),
    "rounding": ({"optimizer": "rounding"}, [("block", 1, 5)]),
    "copies of the model": ({"copy": True, "units": True}, [("block", 1, 5)]),
    "copies with 8 bits": ({"optimizer": "8 bit", "copy": True}, [("block", 1, 5)]),
    # Also in the first step after a recovery, and twice in one step.
    "in a row": (
        {},
        [("backward", 0, 2), ("forward", 1, 2), ("block", 0, 2), ("after", 1, 2), ("block", 1, 3)],
    ),
    "three ranks": ({"ranks": 3}, [("block", 2, 4), ("after", 0, 5)]),
    **{
        f"two hosts, {strategy}": (
            {"ranks": 4, "transport": "hosts", "strategy": strategy},
            [("block", 2, 4), ("after", 1, 5)],
        )
        for strategy in ("full_shard", "hybrid_shard", "zero1")
    },
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", OTHERS)
def test_other_runs(keeper: Keeper, tmp_path: Path, name: str) -> None:
    options, kills = OTHERS[name]
    begins = check(keeper, tmp_path, options, kills)
    assert begins == 3 or name != "in a row"


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


# --- other failures -------------------------------------------------------------------------------

AT = 4  # the step in which it happens


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_in_loader() -> None:
    raise ValueError("a damaged record")


def hang() -> None:
    time.sleep(60)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)


FAILURES: dict[str, tuple[Callable[[], None], tuple[int, ...], dict[int, str]]] = {
    # what happens, on which ranks, and what these and the others say
    "all ranks are killed": (kill, (0, 1), {}),
    "a data loader raises": (raise_in_loader, (1,), {1: "damaged record", 0: "damaged record"}),
    "a rank hangs": (hang, (1,), {0: "PeerTimeoutError"}),
    "Ctrl-C": (interrupt, (0, 1), {0: "KeyboardInterrupt", 1: "KeyboardInterrupt"}),
}


def options_of(what: str, transport: str = "shm") -> dict[str, Any]:
    act, ranks, _ = FAILURES[what]
    timeout = 2 if what == "a rank hangs" else 20
    return {"timeout": timeout, "transport": transport, "fails": (act, AT, ranks)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", FAILURES)
def test_the_next_processes_continue(keeper: Keeper, tmp_path: Path, what: str) -> None:
    arguments = (keeper.token, str(tmp_path), options_of(what), None)
    results = fork_ranks(train, 2, *arguments, until=0 if what == "a rank hangs" else None)
    assert all(result.returncode != 0 for result in results)
    for rank, words in FAILURES[what][2].items():
        assert words in results[rank].stderr
    assert check(keeper, tmp_path, {}, []) == AT


def fails_and_catches(token: str, folder: str, transport: str) -> None:
    """The script catches the exception, so its model is freed before the process ends."""
    with contextlib.suppress(ValueError, zshard.PeerError):
        train(token, folder, options_of("a data loader raises", transport), None)
    gc.collect()
    raise SystemExit(1)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_what_is_kept_outlives_the_model(keeper: Keeper, tmp_path: Path, transport: str) -> None:
    results = fork_ranks(fails_and_catches, 2, keeper.token, str(tmp_path), transport)
    assert [result.returncode for result in results] == [1, 1], [r.stderr for r in results]
    assert check(keeper, tmp_path, {"transport": transport}, []) == AT


def killed_in_save(token: str, folder: str, rank: int | None) -> tuple[int, str, str | None]:
    """Save after step 2; return where it began, the digest, and the newest checkpoint."""
    os.environ[VARIABLE] = token
    run = Run({})
    kept = zshard.Keep(run.model, run.optimizer)
    start = kept.recover({"step": 0})["step"]
    if rank == dist.get_rank():
        checkpoint_save._write_runs = lambda *_: kill()
    for step in range(start, 4):
        kept_step(run, kept, step)
        if step == 2:
            zshard.save(folder, run.model, run.optimizer, step=3, extra={"step": 3})
    return start, run.digest(), zshard.latest_checkpoint(folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_killed_while_it_saves(keeper: Keeper, tmp_path: Path, rank: int) -> None:
    folder = str(tmp_path / "runs")
    results = fork_ranks(killed_in_save, 2, keeper.token, folder, rank)
    assert results[rank].returncode == -signal.SIGKILL
    assert "PeerError" in results[1 - rank].stderr
    found = fork_ranks(killed_in_save, 2, keeper.token, folder, None, check=True)
    assert [result.value[0] for result in found] == [3, 3]
    assert [result.value[2] for result in found] == [None, None]  # the one that was cut off
