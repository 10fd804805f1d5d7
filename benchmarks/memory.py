"""Memory per rank: held between steps, and at its peak over a few training steps.

    python -m benchmarks.memory [--models gpt85m ...] [--sides fsdp2 ...]

Memory is counted as PSS (/proc/self/smaps_rollup), which divides a shared page among the processes
that map it; RSS would charge a rank for its peers' shared memory too. Only the anonymous and
shared-memory parts of PSS count, not mapped files. The libraries' own memory is measured with the
same side on a tiny model and subtracted. Each side runs alone in a fresh process group, with
malloc's mmap threshold fixed, so freed memory returns to the kernel and glibc's caches are not
counted.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.harness import MIB
from benchmarks.models import WORKLOADS
from benchmarks.sides import SIDES, build_side, check_installed

TINY = "tiny32"
TARGET_SIDE = "zshard-full_shard"
PEERS = ("fsdp1", "fsdp2")
"""TARGET_SIDE's peak must not exceed the smaller of theirs."""

ALL_SIDES = ["ddp", "ddp-view", "fsdp1", "fsdp2", "zshard-full_shard"]
QUICK_SIDES = ["fsdp2", "zshard-full_shard"]
PURPOSE = "Measure held and peak memory per rank, one side per process group."
STEPS = 4
PERIOD = 0.003
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072"}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser(PURPOSE, ranks=2)
    models = f"of {', '.join(WORKLOADS)} (default: gpt85m stack100; with --quick: gpt10m)"
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, metavar="MODEL", help=models)
    few = f"with --quick: {' '.join(QUICK_SIDES)}"
    sides = f"of {', '.join(SIDES)} (default: {' '.join(ALL_SIDES)}; {few})"
    parser.add_argument("--sides", nargs="+", choices=SIDES, metavar="SIDE", help=sides)
    args = parser.parse_args(argv)
    args.models = args.models or (["gpt10m"] if args.quick else ["gpt85m", "stack100"])
    args.sides = args.sides or (QUICK_SIDES if args.quick else ALL_SIDES)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if harness.under_torchrun():
        measure_as_rank(args)
        return
    check_installed(args.sides)
    tiny = {side: run_alone(TINY, side, args.ranks) for side in args.sides}
    results = []
    for model in args.models:
        cells = {side: run_alone(model, side, args.ranks) for side in args.sides}
        results.append(compare(model, args.ranks, cells, tiny))
        show(results[-1])
    harness.finish(args, "memory", results)


# --------------------------------------------------------------------------------------
# A rank's part


def run_alone(model: str, side: str, ranks: int) -> list[dict[str, int]]:
    """Measure one side in its own process group and return each rank's bytes."""
    flags = ["--models", model, "--sides", side]
    measured: list[dict[str, int]] = harness.collect("benchmarks.memory", ranks, flags, MALLOC)
    return measured


def measure_as_rank(args: argparse.Namespace) -> None:
    """Measure the first requested model and side in this rank."""
    with harness.process_group() as rank:
        ranks = harness.of_all_ranks(measure(args.models[0], args.sides[0]))
    if rank == 0:
        print(f"{args.models[0]} {args.sides[0]}: {ranks}", flush=True)
        if args.out:
            harness.write_json(args.out, ranks)


def measure(model: str, name: str) -> dict[str, int]:
    """Train STEPS steps; return bytes: held and peak (PSS), peak_rss (kernel's high-water mark).

    peak_rss counts shared pages in full but misses no peak, so it verifies the sampled PSS of the
    sides that share no memory.
    """
    side = build_side(name, WORKLOADS[model])
    generator = harness.generator()
    trim()
    dist.barrier()
    reset_high_water()
    sampler = PssSampler()
    for _ in range(STEPS):
        side.step(side.workload.batch(generator))
        sampler.sample()
    peak = sampler.stop()
    peak_rss = high_water()
    dist.barrier()
    trim()
    return {"held": pss(), "peak": peak, "peak_rss": peak_rss}


class PssSampler(threading.Thread):
    """A thread that samples PSS every PERIOD seconds and keeps the maximum."""

    def __init__(self) -> None:
        super().__init__(name="pss-sampler", daemon=True)
        self._largest = 0
        self._end = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._end.wait(PERIOD):
            self.sample()

    def sample(self) -> None:
        """Take a sample now, from any thread."""
        self._largest = max(self._largest, pss())

    def stop(self) -> int:
        """Stop the thread and return the largest PSS in bytes."""
        self._end.set()
        self.join()
        return self._largest


def pss() -> int:
    """Return this process's PSS of anonymous and shared memory in bytes, without mapped files."""
    text = Path("/proc/self/smaps_rollup").read_bytes()
    return 1024 * sum(int(kib) for kib in re.findall(rb"Pss_(?:Anon|Shmem): +(\d+) kB", text))


def high_water() -> int:
    """Return the largest RSS since reset_high_water(), in bytes."""
    found = re.search(rb"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_bytes())
    return int(found[1]) * 1024 if found else 0


def reset_high_water() -> None:
    """Reset the high-water mark to the current RSS."""
    Path("/proc/self/clear_refs").write_text("5")


def trim() -> None:
    """Make malloc return free memory to the kernel."""
    ctypes.CDLL(None).malloc_trim(0)


# --------------------------------------------------------------------------------------
# The comparison


def compare(
    model: str,
    ranks: int,
    cells: Mapping[str, list[dict[str, int]]],
    tiny: Mapping[str, list[dict[str, int]]],
) -> dict[str, Any]:
    """Return one model's JSON record: bytes per side without libraries, the maximum over ranks."""
    sides: dict[str, Any] = {}
    for name, measured in cells.items():
        net = [
            {key: mine[key] - own[key] for key in mine}
            for mine, own in zip(measured, tiny[name], strict=True)
        ]
        sides[name] = {
            **{f"{key}_bytes": max(rank[key] for rank in net) for key in ("held", "peak")},
            "peak_rss_bytes": max(rank["peak_rss"] for rank in net),
            "target_bytes": None,
            "per_rank": net,
            "libraries_per_rank": tiny[name],
        }
    peaks = [sides[peer]["peak_bytes"] for peer in PEERS if peer in sides]
    if peaks and TARGET_SIDE in sides:
        sides[TARGET_SIDE]["target_bytes"] = min(peaks)
    return {"model": model, "ranks": ranks, **ideal(model, ranks), "sides": sides}


def ideal(model: str, ranks: int) -> dict[str, int]:
    """Return the bytes of the fp32 parameters, and the lower bounds for a full shard with Adam.

    Held: parameters and two moments. Peak, without activations: also gradients and two unsharded
    units.
    """
    workload = WORKLOADS[model]
    with torch.device("meta"):
        module = workload.build()
    units = [child for child in module.modules() if type(child) in workload.units]
    largest = 4 * max(sum(p.numel() for p in unit.parameters()) for unit in units)
    whole = 4 * workload.parameters()
    return {
        "parameter_bytes": whole,
        "ideal_held_bytes": 3 * whole // ranks,
        "ideal_peak_bytes": 4 * whole // ranks + 2 * largest,
    }


def show(result: Mapping[str, Any]) -> None:
    """Print one model's table in MiB."""

    def mib(count: int) -> str:
        return f"{count / MIB:.0f}"

    rows = [
        [
            name,
            mib(side["held_bytes"]),
            mib(side["peak_bytes"]),
            mib(side["peak_rss_bytes"]),
            target_text(side),
        ]
        for name, side in result["sides"].items()
    ]
    rows.append(["ideal", mib(result["ideal_held_bytes"]), mib(result["ideal_peak_bytes"]), "", ""])
    harness.print_table(
        f"{result['model']}: MiB per rank, {result['ranks']} ranks, libraries subtracted; "
        f"the parameters take {mib(result['parameter_bytes'])}",
        ["side", "held", "peak", "peak RSS", "target"],
        rows,
    )


def target_text(side: Mapping[str, Any]) -> str:
    limit = side["target_bytes"]
    if limit is None:
        return ""
    return f"<= {limit / MIB:.0f}: {'met' if side['peak_bytes'] <= limit else 'MISSED'}"


if __name__ == "__main__":
    harness.start(main)
