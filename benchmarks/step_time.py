"""Step time against DDP: full training steps of all sides, interleaved in one process group.

    python -m benchmarks.step_time [--models gpt85m ...] [--sides ddp fsdp2 ...] [--rounds 12]

Each model runs in a fresh torchrun. All sides start from the same values and see the same batches,
so the run also compares their losses with DDP's. With two ranks they should be bit-identical,
because a sum of two terms does not depend on their order; DeepSpeed's may differ in the last bits.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.harness import Sample, Spread
from benchmarks.models import WORKLOADS, Workload
from benchmarks.sides import SIDES, Side, build_side, check_installed

BASE = "ddp"
TARGET_SIDE = "zshard-full_shard"
TARGETS = {"gpt10m": 1.0, "gpt85m": 0.9, "bert": 0.85, "stack100": 0.65}
"""Model -> largest allowed median of TARGET_SIDE / BASE."""

UNTRAINED = ("compute", "local")
"""Sides that do not synchronize their ranks, so their losses are not comparable."""

MODELS = list(TARGETS)
ALL_SIDES = ["compute", "local", "ddp", "fsdp1", "fsdp2", "zshard-full_shard"]
FEW_SIDES = ["ddp", "fsdp2", "zshard-full_shard"]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    purpose = "Measure step time, as a ratio to DDP in the same round."
    parser = harness.parser(
        purpose, ranks=2, rounds="timed steps per side (default: 12; with --quick: 2)"
    )
    models = f"of {', '.join(WORKLOADS)} (default: {' '.join(MODELS)}; with --quick: gpt10m)"
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, metavar="MODEL", help=models)
    few = f"with --quick and for bert: {' '.join(FEW_SIDES)}"
    which = f"of {', '.join(SIDES)} (default: {' '.join(ALL_SIDES)}; {few})"
    parser.add_argument("--sides", nargs="+", choices=SIDES, metavar="SIDE", help=which)
    warmup = "untimed steps per side (default: 3; with --quick: 1)"
    parser.add_argument("--warmup", type=int, help=warmup)
    args = parser.parse_args(argv)
    args.models = args.models or (["gpt10m"] if args.quick else MODELS)
    args.rounds = args.rounds or (2 if args.quick else 12)
    args.warmup = args.warmup or (1 if args.quick else 3)
    return args


def default_sides(model: str, quick: bool) -> list[str]:
    """Return the sides to measure: few for BERT, as all of them need almost 24 GiB."""
    return FEW_SIDES if quick or model == "bert" else ALL_SIDES


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if harness.under_torchrun():
        measure_as_rank(args)
        return
    check_installed(args.sides or ())
    results = []
    for model in args.models:
        sides = args.sides or default_sides(model, args.quick)
        flags = [f"--rounds={args.rounds}", f"--warmup={args.warmup}"]
        command = ["--models", model, "--sides", *sides, *flags]
        results += harness.collect("benchmarks.step_time", args.ranks, command)
    harness.finish(args, "step-time", results)


def measure_as_rank(args: argparse.Namespace) -> None:
    """Measure all requested models in this rank."""
    results = []
    with harness.process_group() as rank:
        for model in args.models:
            names = args.sides or default_sides(model, args.quick)
            result = measure(WORKLOADS[model], names, args.rounds, args.warmup)
            results.append(result)
            if rank == 0:
                show(result)
    if rank == 0 and args.out:
        harness.write_json(args.out, results)


def measure(workload: Workload, names: Sequence[str], rounds: int, warmup: int) -> dict[str, Any]:
    """Train `workload` with all sides in turn and return the JSON record. Collective."""
    sides = {name: build_side(name, workload) for name in names}
    generator = harness.generator()
    batches = [workload.batch(generator) for _ in range(rounds + warmup)]
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in names}

    def turn_of(side: Side) -> harness.Turn:
        def turn(number: int) -> tuple[float]:
            begin = time.perf_counter()
            loss = side.step(batches[number])
            end = time.perf_counter()
            losses[side.name].append(loss)
            return (end - begin,)

        return turn

    turns = {name: turn_of(side) for name, side in sides.items()}
    samples = harness.interleave(turns, rounds, warmup)
    curves = {name: torch.stack(values) for name, values in losses.items()}
    return {
        "model": workload.name,
        "parameters": workload.parameters(),
        "ranks": dist.get_world_size(),
        "sides": {
            name: summarize(workload.name, name, samples, loss_difference(curves, sides[name]))
            for name in names
        },
    }


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

    def milliseconds(sample: Sample) -> float:
        return sample.times[0] * 1e3

    mine = samples[name]
    clean = harness.clean_rounds(mine)
    ratio = None
    if BASE in samples:
        ratio = Spread.of(harness.same_round_ratios(mine, samples[BASE]))
    return {
        "ms": Spread.of([milliseconds(mine[i]) for i in clean]).as_dict(),
        "ratio": ratio.as_dict() if ratio else None,
        "target": TARGETS.get(model) if name == TARGET_SIDE else None,
        "contended": sum(map(harness.contended, mine)),
        "samples_ms": [round(milliseconds(sample), 3) for sample in mine],
        "foreign": [round(sample.foreign, 3) for sample in mine],
        "loss_difference": difference,
    }


def show(result: Mapping[str, Any]) -> None:
    """Print one model's table."""
    rows = []
    for name, side in result["sides"].items():
        ratio, difference = side["ratio"], side["loss_difference"]
        rows.append(
            [
                name,
                Spread(**side["ms"]).text(0),
                Spread(**ratio).text(2) if ratio else "",
                harness.verdict(ratio and ratio["median"], side["target"]),
                "" if difference is None else f"{difference:.1e}" if difference else "0",
                str(side["contended"]),
            ]
        )
    millions = result["parameters"] / 1e6
    harness.print_table(
        f"{result['model']}: {millions:.1f} M parameters, {result['ranks']} ranks",
        ["side", "ms min/med/max", f"x {BASE} min/med/max", "target", "loss diff", "contended"],
        rows,
    )


if __name__ == "__main__":
    harness.start(main)
