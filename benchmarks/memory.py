"""Memory per rank: held between steps, and at its peak over a few training steps.

    python -m benchmarks.memory [--models gpt85m ...] [--sides fsdp2 ...]

Memory is PSS without mapped files: a shared page is divided among the processes that map it. The
libraries' own memory is measured with the same side on a tiny model and subtracted. Each side runs
alone in a fresh process group, with malloc's mmap threshold fixed, so freed memory returns to the
kernel.
"""

from __future__ import annotations

import ctypes
import gc
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.harness import MIB
from benchmarks.models import WORKLOADS
from benchmarks.sides import SIDES, build_side, check_installed

MODULE = "benchmarks.memory"
TINY = "tiny32"
TARGET_SIDE = "zshard-full_shard"
PEERS = ("fsdp1", "fsdp2")
"""TARGET_SIDE's peak must not exceed the smaller of theirs."""

STEPS = 4
PERIOD = 0.003
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072"}
FULL = {
    "ranks": 2,
    "models": ["gpt85m", "stack100"],
    "sides": ["ddp", "ddp-view", "fsdp1", "fsdp2", "zshard-full_shard"],
}
QUICK = {"models": ["gpt10m"], "sides": ["fsdp2", "zshard-full_shard"]}


def main(argv: Sequence[str] | None = None) -> None:
    if harness.under_torchrun():
        harness.run_task(measure, print)
    purpose = "Measure held and peak memory per rank, one side per process group."
    args = harness.options(purpose, argv, FULL, QUICK, {"models": WORKLOADS, "sides": SIDES})
    check_installed(args.sides)

    def run_alone(model: str) -> dict[str, list[dict[str, int]]]:
        """Return each rank's bytes of each side, in a separate process group."""
        return {
            side: harness.collect(MODULE, args.ranks, {"model": model, "name": side}, MALLOC)
            for side in args.sides
        }

    tiny = run_alone(TINY)
    results = [compare(model, args.ranks, run_alone(model), tiny) for model in args.models]
    for result in results:
        ideal_sizes = {key: result[f"ideal_{key}_bytes"] for key in ("held", "peak")}
        rows = {**result["sides"], "ideal": {f"{k}_bytes": n for k, n in ideal_sizes.items()}}
        harness.show(f"{result['model']}, {args.ranks} ranks, without libraries", rows)
    harness.finish(args, "memory", results)


def measure(model: str, name: str) -> list[dict[str, int]]:
    """Train STEPS steps; return each rank's bytes: held and peak (PSS), and peak_rss, the kernel's
    high-water mark: it counts shared pages in full but misses no peak, so it verifies PSS where
    nothing is shared."""
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
    return harness.of_all_ranks({"held": pss(), "peak": peak, "peak_rss": peak_rss})


class PssSampler(threading.Thread):
    """A thread that samples PSS every PERIOD seconds and keeps the maximum."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
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
        """Take a last sample, stop the thread and return the largest PSS in bytes."""
        self.sample()
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


def settled() -> int:
    """Return this rank's PSS while all ranks are idle, once it has stopped changing on all of them:
    a deleted model's memory is released a moment later. Collective."""
    gc.collect()
    trim()
    found, moved = 0, torch.ones(1)
    while moved:
        time.sleep(0.2)
        dist.barrier()
        last, found = found, pss()
        moved = torch.tensor([float(abs(found - last) > MIB)])
        dist.all_reduce(moved)
    return found


Cells = Mapping[str, list[dict[str, int]]]
"""Side -> bytes of each rank."""


def compare(model: str, ranks: int, cells: Cells, tiny: Cells) -> dict[str, Any]:
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
        limit, side = min(peaks), sides[TARGET_SIDE]
        verdict = harness.verdict(side["peak_bytes"] / MIB, limit / MIB)
        side |= {"target_bytes": limit, "verdict": verdict}
    return {"model": model, "ranks": ranks, **ideal(model, ranks), "sides": sides}


def ideal(model: str, ranks: int) -> dict[str, int]:
    """Return the bytes of the fp32 parameters, and the least bytes of a full shard with Adam:
    parameters and two moments; at the peak gradients and two unsharded units as well."""
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


if __name__ == "__main__":
    harness.start(main)
