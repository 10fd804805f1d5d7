"""Full training steps on a GPU: time of all sides in turn, and memory of each side alone.

A turn is several steps between two synchronizations, so the host can run ahead as in training. Its
time is taken with CUDA events, with the clock, and until the host has queued everything (the limit
where steps are short). Memory is measured first, with one side on the GPU at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import gpu_sides, harness
from benchmarks.gpu_sides import BASE, BY_HAND, DDP, OURS, PEER, GpuSide, is_stand_in, synchronize
from benchmarks.harness import MIB, spread
from benchmarks.models import Batch

STEPS_ALONE = 5
COUNTS = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free")
ROOM = 0.9  # fraction of the GPU's memory that the models may fill together
GOALS = {"large": (BASE, 1.01), "small": (PEER, 1.0)}
"""Batch -> the side to compare zshard's step time with, and the largest allowed ratio."""
Record = dict[str, Any]


def measure(cell: Mapping[str, Any]) -> Record:
    """Measure one model, batch and mode: memory of each side, then time of all, unless the part is
    memory. Collective."""
    workload = gpu_sides.workload_of(cell["model"], cell["batch"])
    batches = gpu_sides.batches_of(workload, 8)
    gpu_sides.warm_up()
    memory = {name: alone(name, cell, batches) for name in cell["sides"]}
    memory = harness.of_all_ranks(memory)[0]  # all ranks decide by it
    times: dict[str, Record] = {}
    for group in groups_that_fit(cell["sides"], memory) if cell["part"] == "steps" else []:
        times = together(group, cell, batches) | times
        gpu_sides.forget()
    what = f"{cell['model']}, {workload.parameters() / 1e6:.0f} M, {cell['batch']} batch, "
    return {
        "title": f"{what}{cell['mode']}, {dist.get_world_size()} rank(s), MiB",
        "sides": {name: {**times.get(name, {}), **memory[name]} for name in cell["sides"]},
    }


def alone(name: str, cell: Mapping[str, Any], batches: Sequence[Batch]) -> Record:
    """Measure the MiB of one side: in torch's allocator after each step and at the peak, its
    reserved bytes at that time, calls of cudaMalloc and the like, and zshard's memory(). On a fake
    GPU only the last."""
    gpu_sides.forget()
    stats = {} if is_stand_in() else torch.cuda.memory_stats()
    before = {what: stats.get(f"{what}_bytes.all.current", 0) for what in ("allocated", "reserved")}
    side: Any = gpu_sides.build(
        name, gpu_sides.workload_of(cell["model"], cell["batch"]), cell["mode"]
    )
    held, peak, reserved, counts = [], [], [], []
    for step in range(STEPS_ALONE):
        if not is_stand_in():
            torch.cuda.reset_peak_memory_stats()
        side.step(batches[step % len(batches)])
        synchronize()
        if not is_stand_in():
            stats = torch.cuda.memory_stats()
            held.append((stats["allocated_bytes.all.current"] - before["allocated"]) / MIB)
            peak.append((stats["allocated_bytes.all.peak"] - before["allocated"]) / MIB)
            reserved.append((stats["reserved_bytes.all.peak"] - before["reserved"]) / MIB)
            counts.append([stats.get(count, 0) for count in COUNTS])
        elif name.startswith(OURS):
            held.append(side.module.memory("now")["total"] / MIB)
    found: Record = {"held": held[-1]} if held else {}
    if peak:
        found |= {"peak": max(peak), "reserved": max(reserved)}
        found["no cudaMalloc after step 2"] = len(set(map(str, counts[1:]))) == 1
    found["held is constant"] = len(set(held)) <= 1
    if name.startswith(OURS):
        # Between passes a GPU lends a step's memory to others: a step's peak is predicted.
        taken, predicted = (side.module.memory(what)["total"] for what in ("peak", "predicted"))
        found |= {"taken": taken / MIB, "prediction holds": taken == predicted}
    return found


def groups_that_fit(names: Sequence[str], memory: Mapping[str, Record]) -> list[list[str]]:
    """Return the groups of sides to time together: all, or pairs with BASE if all do not fit."""
    if is_stand_in() or BASE not in names:
        return [list(names)]
    held = sum(memory[name]["held"] for name in names)
    passing = max(memory[name]["peak"] - memory[name]["held"] for name in names)
    if (
        held + passing
        < ROOM * torch.cuda.get_device_properties(gpu_sides.device()).total_memory / MIB
    ):
        return [list(names)]
    return [[BASE, name] for name in names if name != BASE]


def together(
    names: Sequence[str], cell: Mapping[str, Any], batches: Sequence[Batch]
) -> dict[str, Record]:
    """Time the sides in turn and compare their losses: milliseconds, same-round ratios, and loss
    differences. Collective."""
    workload = gpu_sides.workload_of(cell["model"], cell["batch"])
    sides = {name: gpu_sides.build(name, workload, cell["mode"]) for name in names}
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in names}

    def step(side: GpuSide) -> None:
        done = losses[side.name]
        done.append(side.step(batches[len(done) % len(batches)]))

    turns = {name: repeated(partial(step, side), cell["steps"]) for name, side in sides.items()}
    samples = harness.interleave(turns, cell["rounds"], cell["warmup"])
    curves = {name: torch.stack(values).double() for name, values in losses.items()}
    if not all(curve.isfinite().all() for curve in curves.values()):
        raise RuntimeError(f"{workload.name}: a loss is not finite")
    found: dict[str, Record] = {}
    for name, mine in samples.items():
        clean = harness.clean_rounds(mine)
        found[name] = {
            f"ms ({kind})": spread([mine[i].times[k] * 1e3 for i in clean])
            for k, kind in enumerate(("GPU", "clock", "host"))
        }
        for other in (each for each in (BASE, BY_HAND, DDP, PEER) if each in sides):
            ratio = spread(harness.same_round_ratios(mine, samples[other]))
            found[name][f"x {other}"] = ratio
            if (name, other) == (OURS, GOALS[cell["batch"]][0]) and not is_stand_in():
                goal = harness.verdict(ratio["median"], GOALS[cell["batch"]][1])
                found[name]["goal"] = f"x {other} {goal}"
            if other != PEER:
                apart = (curves[name] - curves[other]).abs() / curves[other].abs()
                found[name][f"loss - {other}"] = float(apart.max())
        found[name]["contended"] = sum(map(harness.contended, mine))
    return found


def repeated(call: Callable[[], Any], steps: int) -> harness.Turn:
    """Return a turn of `steps` calls: seconds per call on the device (CUDA events; the clock if the
    GPU is fake), by the clock, and on the host."""

    def turn(_number: int) -> tuple[float, ...]:
        real = not is_stand_in()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if real else []
        synchronize()
        begin = time.perf_counter()
        for event in events[:1]:
            event.record()
        for _ in range(steps):
            call()
        for event in events[1:]:
            event.record()
        queued = time.perf_counter()
        synchronize()
        whole = time.perf_counter() - begin
        on_device = events[0].elapsed_time(events[1]) / 1e3 if real else whole
        return on_device / steps, whole / steps, (queued - begin) / steps

    return turn
