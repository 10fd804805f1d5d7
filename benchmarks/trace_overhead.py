"""What a trace costs: the same model trains without and with zshard.profile(), in turn.

    python -m benchmarks.trace_overhead [--models gpt10m tiny32] [--rounds 40]

One process group, one model; each turn is some steps, and a round has one turn of either kind, so
that a ratio compares neighbors in time. CPU time is that of the rank that took most of it. Starting
and ending the trace is not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import zshard
from benchmarks import harness
from benchmarks.harness import Sample, Spread
from benchmarks.models import WORKLOADS, Workload
from benchmarks.sides import build_side

STEPS = {"gpt10m": 1, "tiny32": 20}
"""Model -> steps of a turn."""

OFF, ON = "off", "on"
PARTS = ("cpu", "wall")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    purpose = "Measure what zshard.profile() adds to a step, as a ratio to the same step without."
    rounds = "turns of either kind (default: 40; with --quick: 2)"
    parser = harness.parser(purpose, ranks=2, rounds=rounds)
    which = f"of {', '.join(STEPS)} (default: all; with --quick: tiny32)"
    parser.add_argument("--models", nargs="+", choices=STEPS, metavar="MODEL", help=which)
    args = parser.parse_args(argv)
    args.models = args.models or (["tiny32"] if args.quick else list(STEPS))
    args.rounds = args.rounds or (2 if args.quick else 40)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if harness.under_torchrun():
        (model,) = args.models
        harness.measure_as_rank(args, lambda: measure(WORKLOADS[model], args.rounds), show)
        return
    flags = harness.flags_of(args, "rounds")
    results = [
        harness.collect("benchmarks.trace_overhead", args.ranks, ["--models", model, *flags])
        for model in args.models
    ]
    harness.finish(args, "trace-overhead", results)


def measure(workload: Workload, rounds: int) -> dict[str, Any]:
    """Time the turns and return the JSON record. Collective."""
    side = build_side("zshard-full_shard", workload)
    batch, steps = workload.batch(harness.generator()), STEPS[workload.name]
    seen: list[int] = []

    def turn_of(traces: bool) -> harness.Turn:
        def turn(_number: int) -> tuple[float, float]:
            trace = zshard.profile(merge=False) if traces else None
            with trace or contextlib.nullcontext():
                cpu, wall = time.process_time(), time.perf_counter()
                for _ in range(steps):
                    side.step(batch)
                times = time.process_time() - cpu, time.perf_counter() - wall
            if trace:
                own = trace.ranks[0]
                seen.append((len(own.ranges) + len(list(own.memory))) // steps)
            return times

        return turn

    turns = {OFF: turn_of(traces=False), ON: turn_of(traces=True)}
    samples = harness.interleave(turns, rounds, warmup=2)
    return {
        "model": workload.name,
        "records_per_step": max(seen),
        "contended": sum(map(harness.contended, samples[OFF] + samples[ON])),
        "turns": 2 * rounds,
        **{part: summarize(samples, i, steps) for i, part in enumerate(PARTS)},
    }


def summarize(samples: Mapping[str, Sequence[Sample]], part: int, steps: int) -> dict[str, Any]:
    """Return the milliseconds of a step without and with a trace, and the ratios in a round."""

    def of(name: str) -> list[Sample]:
        return [Sample((each.times[part] / steps,), each.foreign) for each in samples[name]]

    spreads = {
        name: Spread.of([1e3 * of(name)[i].times[0] for i in harness.clean_rounds(of(name))])
        for name in (OFF, ON)
    }
    ratios = Spread.of(harness.same_round_ratios(of(ON), of(OFF)))
    return {
        "ms": {name: spread.as_dict() for name, spread in spreads.items()},
        "ratio": ratios.as_dict(),
    }


def show(result: Mapping[str, Any]) -> None:
    """Print one model's table."""
    rows = [
        [
            part,
            *(Spread(**result[part]["ms"][name]).text(2) for name in (OFF, ON)),
            Spread(**result[part]["ratio"]).text(3),
        ]
        for part in PARTS
    ]
    harness.print_table(
        f"{result['model']}: {result['records_per_step']} records in a step; "
        f"{result['contended']} of {result['turns']} turns contended",
        ["a step", "off, ms min/med/max", "on, ms min/med/max", "on / off min/med/max"],
        rows,
    )


if __name__ == "__main__":
    harness.start(main)
