"""Full training steps on a GPU: time of all sides in turn, and memory of each side alone.

A turn is several steps between two synchronizations, so the host can run ahead as in training. Its
time is taken with CUDA events, with the clock, and until the host has queued everything (the limit
where steps are short). Memory is measured first, with one side on the GPU at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.gpu_sides import (
    BASE,
    BY_HAND,
    DDP,
    OURS,
    PEER,
    GpuSide,
    batches_of,
    build,
    device,
    forget,
    is_stand_in,
    synchronize,
    warm_up,
    workload_of,
)
from benchmarks.harness import Sample, Spread
from benchmarks.models import Batch

STEPS_ALONE = 5
ROOM = 0.9  # fraction of the GPU's memory that the models may fill together
GOALS = {"large": (BASE, 1.01), "small": (PEER, 1.0)}
"""Batch -> the side to compare zshard's step time with, and the largest allowed ratio."""

COUNTS = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free")


def measure(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Measure one model, batch and mode: memory of each side, then time of all, unless the part is
    memory. Collective.

    cell: "model", "batch", "mode", "sides", "rounds", "warmup", "steps" (in a turn).
    """
    workload = workload_of(cell["model"], cell["batch"])
    batches = batches_of(workload, 8)
    warm_up()
    memory = {name: alone(name, cell, batches) for name in cell["sides"]}
    memory = harness.of_all_ranks(memory)[0]  # all ranks decide by it
    sides: dict[str, Any] = {}
    if cell["part"] == "memory":
        sides = {name: {"memory": found} for name, found in memory.items()}
    for group in [] if sides else groups_that_fit(cell["sides"], memory):
        for name, record in together(group, cell, batches).items():
            sides.setdefault(name, {**record, "memory": memory[name]})
        forget()
    kept = {key: cell[key] for key in ("part", "model", "batch", "mode")}
    size = {"ranks": dist.get_world_size(), "parameters": workload.parameters()}
    return {**kept, **size, "sides": sides}


# --------------------------------------------------------------------------------------
# Memory


def alone(name: str, cell: Mapping[str, Any], batches: Sequence[Batch]) -> dict[str, Any]:
    """Measure the memory of one side: bytes in torch's allocator after each step and at the peak,
    what the allocator has then reserved, calls of cudaMalloc and the like, and zshard's memory().
    Values are None without a GPU."""
    forget()
    before, reserved_before = _now("allocated"), _now("reserved")
    side = build(name, workload_of(cell["model"], cell["batch"]), cell["mode"])
    held, peaks, reserved, counts, now = [], [], [], [], []
    for step in range(STEPS_ALONE):
        if not is_stand_in():
            torch.cuda.reset_peak_memory_stats()
        side.step(batches[step % len(batches)])
        synchronize()
        if not is_stand_in():
            stats = torch.cuda.memory_stats()
            held.append(stats["allocated_bytes.all.current"] - before)
            peaks.append(stats["allocated_bytes.all.peak"] - before)
            reserved.append(stats["reserved_bytes.all.peak"] - reserved_before)
            counts.append([stats.get(count, 0) for count in COUNTS])
        if name.startswith(OURS):
            now.append(_memory(side, "now"))
    # Between passes a GPU lends what a step took to others, so what is predicted is a step's peak.
    taken, predicted = (
        _memory(side, what) if name.startswith(OURS) else None for what in ("peak", "predicted")
    )
    return {
        "held_bytes": held[-1] if held else None,
        "peak_bytes": max(peaks) if peaks else None,
        "reserved_bytes": max(reserved) if reserved else None,
        "held_by_step": held,
        "peak_by_step": peaks,
        "counts_by_step": counts,
        "constant": len(set(held)) <= 1 and len(set(map(str, now))) <= 1,
        "taken": taken,
        "predicted": predicted,
    }


def _memory(side: GpuSide, what: str) -> dict[str, int]:
    found: dict[str, int] = side.module.memory(what)  # type: ignore[operator]
    return found


def _now(what: str) -> int:
    return 0 if is_stand_in() else torch.cuda.memory_stats().get(f"{what}_bytes.all.current", 0)


def groups_that_fit(
    names: Sequence[str], memory: Mapping[str, Mapping[str, Any]]
) -> list[list[str]]:
    """Return the groups of sides to time together: all, or pairs with BASE if all do not fit."""
    if is_stand_in():
        return [list(names)]
    held = sum(memory[name]["held_bytes"] for name in names)
    passing = max(memory[name]["peak_bytes"] - memory[name]["held_bytes"] for name in names)
    total = torch.cuda.get_device_properties(device()).total_memory
    if held + passing < ROOM * total or BASE not in names:
        return [list(names)]
    return [[BASE, name] for name in names if name != BASE]


# --------------------------------------------------------------------------------------
# Time


def together(
    names: Sequence[str], cell: Mapping[str, Any], batches: Sequence[Batch]
) -> dict[str, dict[str, Any]]:
    """Time the sides in turn and compare their losses. Collective."""
    workload = workload_of(cell["model"], cell["batch"])
    sides = {name: build(name, workload, cell["mode"]) for name in names}
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    turns = {
        name: turn_of(side, batches, cell["steps"], losses[name]) for name, side in sides.items()
    }
    samples = harness.interleave(turns, cell["rounds"], cell["warmup"])
    curves = {name: torch.stack(values).double() for name, values in losses.items()}
    for name, curve in curves.items():
        if not curve.isfinite().all():
            raise RuntimeError(f"{workload.name}: the loss of {name} is not finite")
    return {name: summarize(name, cell["batch"], samples, curves) for name in names}


def turn_of(
    side: GpuSide, batches: Sequence[Batch], steps: int, losses: list[torch.Tensor]
) -> harness.Turn:
    """Return a turn of `steps` steps: seconds per step on the device, by the clock, on the host."""

    def turn(number: int) -> tuple[float, float, float]:
        first, last = Events(), Events()
        synchronize()
        begin = time.perf_counter()
        first.record()
        for i in range(steps):
            losses.append(side.step(batches[(number * steps + i) % len(batches)]))
        last.record()
        queued = time.perf_counter()
        synchronize()
        end = time.perf_counter()
        return first.seconds_to(last) / steps, (end - begin) / steps, (queued - begin) / steps

    return turn


class Events:
    """A CUDA event; a clock reading if the GPU is fake."""

    def __init__(self) -> None:
        self.event = None if is_stand_in() else torch.cuda.Event(enable_timing=True)
        self.clock = 0.0

    def record(self) -> None:
        self.clock = time.perf_counter()
        if self.event is not None:
            self.event.record()

    def seconds_to(self, later: Events) -> float:
        """Return the seconds until `later`. Call it after the device has passed both."""
        if self.event is None or later.event is None:
            return later.clock - self.clock
        return float(self.event.elapsed_time(later.event)) / 1e3


def summarize(
    name: str,
    batch: str,
    samples: Mapping[str, list[Sample]],
    curves: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """Return one side's record: milliseconds, same-round ratios, and loss differences."""
    mine = samples[name]
    clean = harness.clean_rounds(mine)
    kinds = ("ms", "wall_ms", "host_ms")
    times = {
        kind: Spread.of([mine[i].times[k] * 1e3 for i in clean]).as_dict()
        for k, kind in enumerate(kinds)
    }
    ratios = {
        other: Spread.of(harness.same_round_ratios(mine, samples[other])).as_dict()
        for other in (BASE, BY_HAND, DDP, PEER)
        if other in samples and other != name
    }
    against, limit = GOALS[batch]
    judged = name == OURS and not is_stand_in()
    return {
        **times,
        "ratio": ratios,
        "goal": {"against": against, "limit": limit} if judged else None,
        "contended": sum(map(harness.contended, mine)),
        "loss_difference": {
            other: float(((curves[name] - curves[other]).abs() / curves[other].abs()).max())
            for other in (BASE, BY_HAND, DDP)
            if other in curves and other != name
        },
    }


def repeated(call: Callable[[], Any], steps: int) -> harness.Turn:
    """Return the turn that makes `steps` calls, and takes the mean of the GPU's seconds."""

    def turn(_number: int) -> tuple[float, ...]:
        first, last = Events(), Events()
        synchronize()
        first.record()
        for _ in range(steps):
            call()
        last.record()
        synchronize()
        return (first.seconds_to(last) / steps,)

    return turn
