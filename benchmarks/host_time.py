"""Host time: each library's overhead in a unit's forward and backward.

    python -m benchmarks.host_time [--ranks 1 2] [--sides ddp fsdp2 ...] [--rounds 40]

The model is TINY_BLOCKS blocks with almost no arithmetic, so (a side's time - the plain module's
time) / TINY_BLOCKS is the library's own work per unit, including waits if there are 2 ranks. A
sample is the mean of STEPS steps, without the optimizer and zero_grad.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from benchmarks import harness
from benchmarks.harness import Sample
from benchmarks.models import TINY_BLOCKS, WORKLOADS, Batch
from benchmarks.sides import DEEPSPEED, SIDES, Side, build_side

PLAIN = "compute"
TARGET_SIDE = "zshard-full_shard"
TARGETS: dict[int, dict[str, float]] = {1: {"fsdp2": 1 / 20, "ddp": 1.0}, 2: {"fsdp2": 1 / 5}}
"""Ranks -> peer -> largest allowed median of TARGET_SIDE's added time / the peer's."""

HOOKED = [name for name in SIDES if name not in DEEPSPEED]
"""Sides whose backward runs without the optimizer."""

STEPS = 10
PARTS = ("forward", "backward", "total")
FULL = {
    "ranks": [1, 2],
    "sides": ["ddp", "fsdp2", "zshard-full_shard", "zshard-no_shard"],
    "rounds": 40,
    "warmup": 2,
}
QUICK = {"sides": ["ddp", "fsdp2", "zshard-full_shard"], "rounds": 5}


def main(argv: Sequence[str] | None = None) -> None:
    if harness.under_torchrun():
        harness.run_task(measure, show)
    purpose = "Measure the host time that each library adds to a unit's forward and backward."
    args = harness.options(purpose, argv, FULL, QUICK, {"sides": HOOKED})
    task = {"names": args.sides, "rounds": args.rounds, "warmup": args.warmup}
    results = [harness.collect("benchmarks.host_time", ranks, task) for ranks in args.ranks]
    harness.finish(args, "host-time", results)


def measure(names: Sequence[str], rounds: int, warmup: int) -> dict[str, Any]:
    """Time all sides and the plain module and return the JSON record. Collective."""
    workload = WORKLOADS["tiny32"]
    batch = workload.batch(harness.generator())
    sides = {name: build_side(name, workload) for name in dict.fromkeys([PLAIN, *names])}
    turns = {name: turn_of(side, batch, STEPS) for name, side in sides.items()}
    samples = harness.interleave(turns, rounds, warmup)
    ranks = dist.get_world_size()
    return {
        "model": workload.name,
        "units": TINY_BLOCKS,
        "ranks": ranks,
        "plain_us": {
            part: harness.spread([s.times[i] * 1e6 / TINY_BLOCKS for s in samples[PLAIN]])
            for i, part in enumerate(PARTS)
        },
        "sides": {name: summarize(name, samples, ranks) for name in names if name != PLAIN},
    }


def turn_of(
    side: Side, batch: Batch, steps: int, before: Callable[[], object] = lambda: None
) -> harness.Turn:
    """Return a turn of `steps` steps whose times are the means of PARTS. `before` is called before
    each step, untimed."""

    def turn(_number: int) -> tuple[float, float, float]:
        forward = backward = 0.0
        for _ in range(steps):
            before()
            begin = time.perf_counter()
            loss = side.forward(batch)
            middle = time.perf_counter()
            loss.backward()  # type: ignore[no-untyped-call]
            end = time.perf_counter()
            forward += middle - begin
            backward += end - middle
            side.zero_grad()
        return forward / steps, backward / steps, (forward + backward) / steps

    return turn


def added(samples: Mapping[str, Sequence[Sample]], name: str, part: int) -> list[Sample]:
    """Return a side's overhead per unit in each round, as samples in seconds."""
    return [
        Sample(((a.times[part] - b.times[part]) / TINY_BLOCKS,), max(a.foreign, b.foreign))
        for a, b in zip(samples[name], samples[PLAIN], strict=True)
    ]


def summarize(name: str, samples: Mapping[str, list[Sample]], ranks: int) -> dict[str, Any]:
    """Return one side's record: microseconds added per unit, and ratios to the peers."""
    part_of = {part: added(samples, name, i) for i, part in enumerate(PARTS)}
    clean = harness.clean_rounds(part_of["total"])
    targets = TARGETS.get(ranks, {}) if name == TARGET_SIDE else {}
    ratios: dict[str, Any] = {}
    for peer in ("ddp", "fsdp2"):
        if peer in samples and peer != name:
            peers = added(samples, peer, PARTS.index("total"))
            values = harness.same_round_ratios(part_of["total"], peers)
            ratios[peer] = harness.spread(values) if values else None
    us = {
        part: harness.spread([values[i].times[0] * 1e6 for i in clean])
        for part, values in part_of.items()
    }
    verdicts = {
        peer: harness.verdict(ratios[peer]["median"], most)
        for peer, most in targets.items()
        if ratios.get(peer)
    }
    return {"added_us": us, "ratio": ratios, "target": targets, "verdict": verdicts}


def show(result: Mapping[str, Any]) -> None:
    title = f"us per unit of {result['units']}, {result['ranks']} ranks"
    harness.show(title, {PLAIN: result["plain_us"], **result["sides"]})


if __name__ == "__main__":
    harness.start(main)
