"""Step time against DDP: full training steps of all sides, interleaved in one process group.

    python -m benchmarks.step_time [--models gpt85m ...] [--sides ddp fsdp2 ...] [--rounds 12]

Each model runs in a fresh torchrun. All sides start from the same values and see the same batches,
so the run also compares their losses with DDP's. With two ranks they should be bit-identical,
because a sum of two terms does not depend on their order; DeepSpeed's may differ in the last bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.harness import Sample
from benchmarks.models import WORKLOADS, Batch
from benchmarks.sides import SIDES, Side, build_side, check_installed

BASE = "ddp"
TARGET_SIDE = "zshard-full_shard"
TARGETS = {"gpt10m": 1.0, "gpt85m": 0.9, "bert": 0.85, "stack100": 0.65}
"""Model -> largest allowed median of TARGET_SIDE / BASE."""

UNTRAINED = ("compute", "local")
"""Sides that do not synchronize their ranks, so their losses are not comparable."""

FEW_SIDES = ["ddp", "fsdp2", "zshard-full_shard"]
FULL = {
    "ranks": 2,
    "models": list(TARGETS),
    "sides": ["compute", "local", "ddp", "fsdp1", "fsdp2", "zshard-full_shard"],
    "rounds": 12,
    "warmup": 3,
}
QUICK = {"models": ["gpt10m"], "sides": FEW_SIDES, "rounds": 2, "warmup": 1}


def main(argv: Sequence[str] | None = None) -> None:
    if harness.under_torchrun():
        harness.run_task(measure, show)
    purpose = "Measure step time, as a ratio to DDP in the same round."
    args = harness.options(purpose, argv, FULL, QUICK, {"models": WORKLOADS, "sides": SIDES})
    check_installed(args.sides)
    results = []
    for model in args.models:
        # all sides of BERT need almost 24 GiB
        sides = FEW_SIDES if model == "bert" and args.sides == FULL["sides"] else args.sides
        task = {"model": model, "names": sides, "rounds": args.rounds, "warmup": args.warmup}
        results.append(harness.collect("benchmarks.step_time", args.ranks, task))
    harness.finish(args, "step-time", results)


def measure(
    model: str,
    names: Sequence[str],
    rounds: int,
    warmup: int,
    more: Callable[[Side, Batch], dict[str, Any]] = lambda side, batch: {},
) -> dict[str, Any]:
    """Train a model with all sides in turn and return the JSON record. `more` measures more of a
    side, then, with a last batch. Collective."""
    workload = WORKLOADS[model]
    sides = {name: build_side(name, workload) for name in names}
    generator = harness.generator()
    batches = [workload.batch(generator) for _ in range(rounds + warmup)]
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in names}

    turns = {name: step_turn(side, batches, losses[name]) for name, side in sides.items()}
    samples = harness.interleave(turns, rounds, warmup)
    curves = {name: torch.stack(values) for name, values in losses.items()}
    records = {}
    for name, side in sides.items():
        records[name] = summarize(model, name, samples, loss_difference(curves, side))
        records[name] |= more(side, batches[-1])
    facts = {"model": model, "parameters": workload.parameters(), "ranks": dist.get_world_size()}
    return {**facts, "sides": records}


def step_turn(side: Side, batches: Sequence[Batch], losses: list[torch.Tensor]) -> harness.Turn:
    """Return a turn of one step, which appends its loss to `losses`."""

    def turn(number: int) -> tuple[float]:
        begin = time.perf_counter()
        loss = side.step(batches[number])
        end = time.perf_counter()
        losses.append(loss)
        return (end - begin,)

    return turn


def loss_difference(curves: Mapping[str, torch.Tensor], side: Side) -> float | None:
    """Return the largest difference of a side's losses to BASE's over steps and ranks. Collective.

    Return None for the base itself, without a base, and for UNTRAINED. Raises RuntimeError if a
    loss is not finite, because times of arithmetic on NaN are meaningless.
    """
    if BASE not in curves or side.name in (BASE, *UNTRAINED):
        return None
    difference = (curves[side.name] - curves[BASE]).abs().max().double()
    worst = difference.nan_to_num(math.inf)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if math.isinf(worst):
        raise RuntimeError(f"{side.workload.name}: the loss of {side.name} or {BASE} is not finite")
    return float(worst)


def summarize(
    model: str, name: str, samples: Mapping[str, list[Sample]], difference: float | None
) -> dict[str, Any]:
    """Return one side's record, with times in milliseconds."""

    mine = samples[name]
    ms = [sample.times[0] * 1e3 for sample in mine]
    target, ratio = (TARGETS.get(model) if name == TARGET_SIDE else None), None
    if BASE in samples:
        ratio = harness.spread(harness.same_round_ratios(mine, samples[BASE]))
    return {
        "ms": harness.spread([ms[i] for i in harness.clean_rounds(mine)]),
        "ratio": ratio,
        "verdict": harness.verdict(ratio and ratio["median"], target),
        "target": target,
        "contended": sum(map(harness.contended, mine)),
        "samples_ms": [round(each, 3) for each in ms],
        "foreign": [round(sample.foreign, 3) for sample in mine],
        "loss_difference": difference,
    }


def show(result: Mapping[str, Any]) -> None:
    size = f"{result['parameters'] / 1e6:.1f} M parameters, {result['ranks']} ranks"
    harness.show(f"{result['model']}: {size}; ratio to {BASE}", result["sides"])


if __name__ == "__main__":
    harness.start(main)
