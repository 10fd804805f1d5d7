"""The guard of slices: what it adds to the step of torch's optimizers.

    python -m benchmarks.guard [--models gpt10m] [--rounds 40]

Both turns step the same optimizer over the same shards of two ranks; one of them with
__torch_function__ of subclasses switched off, as if the shards were plain tensors. So the ratio is
the guard's cost alone, zero_grad() included.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import zshard
from benchmarks import harness
from benchmarks.harness import Spread
from benchmarks.models import WORKLOADS

WAYS: dict[str, tuple[Callable[..., torch.optim.Optimizer], float]] = {
    "torch AdamW, fused": (lambda params: torch.optim.AdamW(params, fused=True), 1.02),
    "torch AdamW, foreach": (lambda params: torch.optim.AdamW(params, foreach=True), 1.02),
    "torch AdamW, plain loop": (lambda params: torch.optim.AdamW(params, foreach=False), 1.10),
    "zshard AdamW": (zshard.AdamW, 1.02),
}
"""Each way to step, and the largest median ratio allowed."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser(
        "Measure what guarding slices adds to an optimizer's step.", 2, rounds="(default: 40)"
    )
    parser.add_argument("--models", nargs="+", default=["gpt10m"], choices=sorted(WORKLOADS))
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (5 if args.quick else 40)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if harness.under_torchrun():
        measure_as_rank(args)
        return
    flags = [f"--rounds={args.rounds}", "--models", *args.models]
    results = [harness.collect("benchmarks.guard", 2, flags)]
    harness.finish(args, "guard", results)


def measure_as_rank(args: argparse.Namespace) -> None:
    """Measure in this rank."""
    with harness.process_group() as rank:
        results = {name: measure(name, args.rounds) for name in args.models}
    if rank == 0:
        for name, result in results.items():
            show(name, result)
        if args.out:
            harness.write_json(args.out, results)


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Return the ratios of one model's optimizers. Collective."""
    workload = WORKLOADS[name]
    model = zshard.FSDP(workload.build(), auto_wrap_policy=workload.units)
    workload.loss(model, workload.batch(harness.generator())).backward()
    found = {}
    for way, (make, limit) in WAYS.items():
        optimizer = make(model.parameters())
        turns = {
            "guarded": turn_of(optimizer, contextlib.nullcontext()),
            "plain": turn_of(optimizer, torch._C.DisableTorchFunctionSubclass()),
        }
        samples = harness.interleave(turns, rounds, warmup=2)
        ratios = harness.same_round_ratios(samples["guarded"], samples["plain"])
        seconds = [sample.times[0] * 1e3 for sample in samples["plain"]]
        found[way] = {
            "ratio": Spread.of(ratios).as_dict(),
            "plain_ms": Spread.of(seconds).as_dict(),
            "target": limit,
        }
    return found


def turn_of(optimizer: torch.optim.Optimizer, context: Any) -> harness.Turn:
    """Return a turn of one step, with gradients that are zeroed in place before."""

    def turn(_number: int) -> tuple[float]:
        begin = time.perf_counter()
        with context:
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()
        return (time.perf_counter() - begin,)

    return turn


def show(name: str, result: dict[str, Any]) -> None:
    """Print the table for one model."""
    rows = [
        [
            way,
            Spread(**each["plain_ms"]).text(1),
            Spread(**each["ratio"]).text(3),
            harness.verdict(each["ratio"]["median"], each["target"]),
        ]
        for way, each in result.items()
    ]
    harness.print_table(
        f"{name}, 2 ranks: a step with guarded slices / with plain ones, min/med/max",
        ["optimizer", "plain, ms", "ratio", "target"],
        rows,
    )


if __name__ == "__main__":
    harness.start(main)
