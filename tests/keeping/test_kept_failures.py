"""Failures other than one killed rank: what the next processes find is the last step that all ranks
completed, and the run ends with the numbers of an undisturbed one."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from kept_training import Run, kept_step, losses_in, train, undisturbed
from nursery import fork_ranks

import zshard
from zshard.extras.keeping.client import VARIABLE, Keeper

checkpoint_save: Any = importlib.import_module("zshard.checkpoint.save")

AT = 4  # the step in which it happens


def kill(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_in_loader(folder: Path) -> None:
    raise ValueError("a damaged record")


def hang(folder: Path) -> None:
    """Until the other rank has noticed."""
    while not (folder / "noticed").exists():
        time.sleep(0.01)
    kill(folder)


def interrupt(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)


FAILURES: dict[str, tuple[Callable[[Path], None], tuple[int, ...], dict[str, str]]] = {
    # what happens, on which ranks, and what these and the others say
    "all ranks are killed": (kill, (0, 1), {}),
    "a data loader raises": (raise_in_loader, (1,), {"1": "damaged record", "0": "damaged record"}),
    "a rank hangs": (hang, (1,), {"0": "PeerTimeoutError"}),
    "Ctrl-C": (interrupt, (0, 1), {"0": "KeyboardInterrupt", "1": "KeyboardInterrupt"}),
}


def fails(token: str, folder: str, what: str, transport: str = "shm") -> None:
    os.environ[VARIABLE] = token
    act, ranks, _ = FAILURES[what]

    class Failing(Run):
        def loss(self, step: int) -> Any:
            if step == AT and dist.get_rank() in ranks:
                act(Path(folder))
            return super().loss(step)

    import kept_training

    kept_training.Run = Failing  # type: ignore[misc]
    options = {"timeout": 2 if what == "a rank hangs" else 20, "transport": transport}
    try:
        train(token, folder, options, None)
    except zshard.PeerTimeoutError:
        Path(folder, "noticed").touch()
        raise


def fails_and_catches(token: str, folder: str, transport: str) -> None:
    """The script catches the exception, so its model is freed before the process ends."""
    with contextlib.suppress(ValueError, zshard.PeerError):
        fails(token, folder, "a data loader raises", transport)
    gc.collect()
    raise SystemExit(1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", FAILURES)
def test_the_next_processes_continue(keeper: Keeper, tmp_path: Path, what: str) -> None:
    expected = undisturbed({})
    results = fork_ranks(fails, 2, keeper.token, str(tmp_path), what)
    assert all(result.returncode not in (0, None) for result in results)
    for rank, words in FAILURES[what][2].items():
        assert words in results[int(rank)].stderr
    continues(keeper, tmp_path, {}, expected)


def continues(keeper: Keeper, folder: Path, options: dict[str, Any], expected: list[Any]) -> None:
    """The next processes begin at that step, and end as undisturbed ones."""
    found = fork_ranks(train, 2, keeper.token, str(folder), options, None, check=True)
    assert [result.value for result in found] == [(AT, digest) for digest, _ in expected]
    assert [losses_in(folder, rank) for rank in range(2)] == [losses for _, losses in expected]


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_what_is_kept_outlives_the_model(keeper: Keeper, tmp_path: Path, transport: str) -> None:
    options = {"transport": transport}
    results = fork_ranks(fails_and_catches, 2, keeper.token, str(tmp_path), transport)
    assert [result.returncode for result in results] == [1, 1], [r.stderr for r in results]
    continues(keeper, tmp_path, options, undisturbed(options))


def killed_in_save(token: str, folder: str, rank: int | None) -> tuple[int, str, str | None]:
    """Save after step 2; return where it began, the digest, and the newest checkpoint."""
    os.environ[VARIABLE] = token
    run = Run({})
    kept = zshard.Keep(run.model, run.optimizer)
    start = kept.recover({"step": 0})["step"]
    if rank == dist.get_rank():
        checkpoint_save._write_runs = lambda *_: kill(Path(folder))
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
