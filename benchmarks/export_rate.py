"""Full tensors of a sharded model: GiB/s and peak memory of zshard.export() and of FSDP2's ways.

    python -m benchmarks.export_rate [--models gpt85m] [--rounds 9]

Every rank gets all tensors, and drops each bucket or tensor before the next; a state dict it drops
at its end. The rate counts the bytes of the full float32 parameters. Sides alternate in one process
group. Peaks are measured in rounds of their own: PSS above that before the call, which divides
shared pages among the processes that map them. (See benchmarks/memory.py.)
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from benchmarks import harness
from benchmarks.harness import MIB, Spread
from benchmarks.memory import MALLOC, PssSampler, pss, trim
from benchmarks.models import WORKLOADS
from benchmarks.sides import build_side

PURPOSE = "Measure how fast full tensors can be had from a sharded model, and at which peak."
BASE = "fsdp2-full_tensor"


def exported(model: nn.Module, **options: Any) -> None:
    import zshard

    for bucket in zshard.export(model, **options):
        del bucket


def each_full_tensor(model: nn.Module, dtype: torch.dtype) -> None:
    for param in model.parameters():
        whole = param.full_tensor().to(dtype)  # type: ignore[attr-defined]
        del whole


def full_state_dict(model: nn.Module) -> None:
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def ways(model: str) -> dict[str, Callable[[], None]]:
    """Return the sides of a comparison. Collective."""
    import zshard

    ours = build_side("zshard-full_shard", WORKLOADS[model]).module
    over_c10d = build_side("zshard-full_shard-c10d", WORKLOADS[model]).module
    theirs = build_side("fsdp2", WORKLOADS[model]).module
    since = zshard.Exported()
    exported(ours, since=since)
    low = torch.bfloat16
    return {
        "zshard-export": lambda: exported(ours, bucket="64MiB"),
        "zshard-export-bf16": lambda: exported(ours, bucket="64MiB", dtype=low),
        "zshard-export-c10d": lambda: exported(over_c10d, bucket="64MiB"),
        "zshard-export-unchanged": lambda: exported(ours, bucket="64MiB", since=since),
        BASE: lambda: each_full_tensor(theirs, torch.float32),
        "fsdp2-full_tensor-bf16": lambda: each_full_tensor(theirs, low),
        "fsdp2-get_model_state_dict": lambda: full_state_dict(theirs),
    }


def timed(way: Callable[[], None]) -> Callable[[int], tuple[float, ...]]:
    def turn(_: int) -> tuple[float, ...]:
        begun = time.perf_counter()
        way()
        return (time.perf_counter() - begun,)

    return turn


def peak_of(way: Callable[[], None]) -> int:
    """Return the largest PSS during a call above that before it, in bytes. Collective."""
    trim()
    dist.barrier()
    before, sampler = pss(), PssSampler()
    way()
    sampler.sample()
    return sampler.stop() - before


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for model in args.models:
        sides = ways(model)
        turns = {name: timed(way) for name, way in sides.items()}
        samples = harness.interleave(turns, args.rounds, warmup=1)
        peaks = {name: max(harness.of_all_ranks(peak_of(way))) for name, way in sides.items()}
        size = 4 * WORKLOADS[model].parameters()
        rows = {
            name: {
                "gib_per_s": Spread.of([size / 2**30 / s.times[0] for s in own]).as_dict(),
                "seconds": Spread.of([s.times[0] for s in own]).as_dict(),
                "speed_ratio": Spread.of(
                    [b.times[0] / s.times[0] for s, b in zip(own, samples[BASE], strict=True)]
                ).as_dict(),
                "foreign": Spread.of([s.foreign for s in own]).as_dict(),
                "peak_bytes": peaks[name],
            }
            for name, own in samples.items()
        }
        facts = {"model": model, "ranks": dist.get_world_size(), "bytes": size}
        found.append({**facts, "sides": rows})
    return found


def show(results: list[dict[str, Any]]) -> None:
    for result in results:
        print(f"{result['model']}, {result['ranks']} ranks, {result['bytes'] / MIB:.0f} MiB")
        print(f"  {'side':28} {'GiB/s':>8} {'of ' + BASE:>22} {'peak MiB':>10}")
        for name, row in result["sides"].items():
            rate, ratio = row["gib_per_s"]["median"], row["speed_ratio"]["median"]
            print(f"  {name:28} {rate:8.2f} {ratio:22.2f} {row['peak_bytes'] / MIB:10.0f}")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser(PURPOSE, ranks=2, rounds="rounds (default: 9; with --quick: 2)")
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, help="default: gpt85m")
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (2 if args.quick else 9)
    args.models = args.models or (["gpt10m"] if args.quick else ["gpt85m"])
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if harness.under_torchrun():
        harness.measure_as_rank(args, lambda: measure(args), show)
        return
    flags = [f"--rounds={args.rounds}", "--models", *args.models]
    results = harness.collect("benchmarks.export_rate", args.ranks, flags, MALLOC)
    harness.finish(args, "export", results)


if __name__ == "__main__":
    harness.start(main)
