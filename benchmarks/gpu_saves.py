"""Checkpoints on a GPU: seconds and GB/s of saves and loads, and steps beside an asynchronous save.

The savers are those of saves.py, with the models of gpu_sides.py. Files are in the system's
temporary folder (TMPDIR), on the disk and with fsync.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks import saves
from benchmarks.gpu_sides import (
    OURS,
    PEER,
    GpuSide,
    batches_of,
    build,
    forget,
    synchronize,
    workload_of,
)
from benchmarks.models import Batch

SAVERS = {OURS: saves.Zshard, PEER: saves.Dcp}


def measure(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Measure each library's checkpoints of one model, for one rank.

    cell: "model", "steps" (timed without a save, and as few at least beside one).
    """
    batches = batches_of(workload_of(cell["model"], "small"), 4)
    folder = tempfile.mkdtemp(prefix="zshard-bench-")
    sides = {}
    try:
        for name in SAVERS:
            sides[name], size = _of_side(name, cell, batches, folder)
            forget()
    finally:
        shutil.rmtree(folder)
    return {"part": "saves", "model": cell["model"], "state_bytes": size, "sides": sides}


def _of_side(
    name: str, cell: Mapping[str, Any], batches: Sequence[Batch], folder: str
) -> tuple[dict[str, float], int]:
    side = build(name, workload_of(cell["model"], "small"))
    now, later = (SAVERS[name](side.module, side.optimizer, wait) for wait in (False, True))
    _seconds(lambda: _steps(side, batches, 2))  # creates the state
    size = sum(tensor.numel() * tensor.element_size() for tensor in now.own())
    step = _seconds(lambda: _steps(side, batches, cell["steps"])) / cell["steps"]
    path = os.path.join(folder, name)
    save = _seconds(lambda: now.save(path)())
    wanted = _sums(now)
    _steps(side, batches, 1)
    saves.drop(path)
    load = _seconds(lambda: now.load(path))
    if _sums(now) != wanted:
        raise AssertionError(f"{name} loaded different values than it saved")
    shutil.rmtree(path)
    found = {"step (s)": step, "save (s)": save, "load, cold (s)": load}
    found |= {"save (GB/s)": size / save / 1e9, "load (GB/s)": size / load / 1e9}
    found |= _beside_steps(side, later, batches, path, cell["steps"])
    shutil.rmtree(path)
    return found, size


def _beside_steps(
    side: GpuSide, saver: Any, batches: Sequence[Batch], path: str, least: int
) -> dict[str, float]:
    """What an asynchronous save takes, and steps beside it: `least`, or until it has ended."""
    synchronize()
    begin = time.perf_counter()
    wait = saver.save(path)
    blocked = time.perf_counter() - begin
    ends: list[float] = []
    waiting = threading.Thread(target=lambda: ends.append(_waited(wait, begin)))
    waiting.start()
    first, count = time.perf_counter(), 0
    while count < least or waiting.is_alive():
        _steps(side, batches, 1)
        synchronize()
        count += 1
    step = (time.perf_counter() - first) / count
    waiting.join()
    return {"async: blocks (s)": blocked, "async: all (s)": ends[0], "async: step beside (s)": step}


def _waited(wait: Callable[[], Any], begin: float) -> float:
    wait()
    return time.perf_counter() - begin


def _steps(side: GpuSide, batches: Sequence[Batch], count: int) -> None:
    for step in range(count):
        side.step(batches[step % len(batches)])


def _seconds(call: Callable[[], Any]) -> float:
    synchronize()
    begin = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - begin


def _sums(saver: Any) -> list[float]:
    """Fingerprints of the state; a second copy of it might not fit."""
    return [float(tensor.sum(dtype=torch.float64)) for tensor in saver.own()]
