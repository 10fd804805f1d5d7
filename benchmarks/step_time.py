"""Step time against DDP: whole training steps of all sides, interleaved in one process group.

    python -m benchmarks.step_time [--models gpt85m ...] [--sides ddp fsdp2 ...] [--rounds 12]

Each model gets a fresh torchrun. The sides see the same batches from the same start, so on the
way the run shows whether their losses are those of DDP: bit-equal is expected of two ranks, where
a sum of two terms has no order.
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
from benchmarks.sides import SIDES, Side, build_side

BASE = "ddp"
TARGET_SIDE = "zshard-full_shard"
TARGETS = {"gpt10m": 1.0, "gpt85m": 0.9, "bert": 0.85, "stack100": 0.65}
"""The largest median ratio of TARGET_SIDE to BASE that the project allows itself."""

UNTRAINED = ("compute", "local")
"""Sides whose ranks go their own ways: their losses are not comparable."""

MODELS = list(TARGETS)
ALL_SIDES = ["compute", "local", "ddp", "fsdp1", "fsdp2", "zshard-full_shard"]
FEW_SIDES = ["ddp", "fsdp2", "zshard-full_shard"]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    purpose = "Step time of the sides, as a ratio to DDP in the same round."
    parser = harness.parser(purpose, ranks=2, rounds="measured steps a side (12; quick: 2)")
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, help="default: all with a target")
    parser.add_argument("--sides", nargs="+", choices=SIDES, help="default: six; three for bert")
    parser.add_argument("--warmup", type=int, help="unmeasured steps a side (3; quick: 1)")
    args = parser.parse_args(argv)
    args.models = args.models or (["gpt10m"] if args.quick else MODELS)
    args.rounds = args.rounds or (2 if args.quick else 12)
    args.warmup = args.warmup or (1 if args.quick else 3)
    return args


def default_sides(model: str, quick: bool) -> list[str]:
    """Six sides of BERT's size, each with its Adam states, near 24 GiB: it gets three."""
    return FEW_SIDES if quick or model == "bert" else ALL_SIDES


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if harness.under_torchrun():
        measure_as_rank(args)
        return
    results = []
    for model in args.models:
        sides = args.sides or default_sides(model, args.quick)
        flags = [f"--rounds={args.rounds}", f"--warmup={args.warmup}"]
        command = ["--models", model, "--sides", *sides, *flags]
        results += harness.collect("benchmarks.step_time", args.ranks, command)
    harness.finish(args, "step-time", results)


def measure_as_rank(args: argparse.Namespace) -> None:
    """One rank's part: all models asked for, in this process group."""
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
    """Train `workload` by all the sides in turn; returns the JSON record. Collective."""
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
    """The largest difference of a side's losses to BASE's, over all steps and ranks. Collective.

    None for the base itself, without it, and for sides that do not train as it does. Raises
    RuntimeError if a loss is not finite: times of arithmetic on NaN say nothing.
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
    """One side's part of the record. Times in milliseconds."""

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
