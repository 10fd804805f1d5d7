"""A rank's part of hosts.py: step time, bytes on the wire and peak memory of the sides.

What a step sends is what the counters of the host's interface say before and after
it, with all ranks quiet, minus what they say of a step that does nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness, memory, step_time
from benchmarks.hosts_net import wire_bytes
from benchmarks.models import WORKLOADS, Batch, Workload
from benchmarks.sides import Side, build_side

MODULE = "benchmarks.hosts_steps"
QUIET = 0.1
"""Seconds until what is under way has arrived."""

MEMORY_STEPS = 4
"""keep_gathered="auto" decides in the second; the third is the first with what stays."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Run by benchmarks.hosts.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--sides", nargs="+", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--ranks-per-host", type=int, required=True)
    parser.add_argument("--memory", action="store_true", help="the bytes of the only side")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    workload = WORKLOADS[args.model]
    with harness.process_group() as rank:
        if args.memory:
            result = bytes_of_hosts(workload, args.sides[0], args.ranks_per_host)
        else:
            result = measure(workload, args)
    if rank == 0:
        harness.write_json(args.out, result)


def measure(workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Train `workload` with all sides in turn; return {side: record}. Collective."""
    sides = {name: build_side(name, workload) for name in args.sides}
    generator = harness.generator()
    batches = [workload.batch(generator) for _ in range(args.rounds + args.warmup + 1)]
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in sides}
    turns = {name: _turn(side, batches, losses[name]) for name, side in sides.items()}
    samples = harness.interleave(turns, args.rounds, args.warmup)
    curves = {name: torch.stack(values) for name, values in losses.items()}
    idle = _wire(lambda: None, args.ranks_per_host)
    found = {}
    for name, side in sides.items():
        difference = step_time.loss_difference(curves, side)
        record = step_time.summarize(workload.name, name, samples, difference)
        record["target"] = None  # those of one host
        record["wire"] = _minus(_wire(partial(side.step, batches[-1]), args.ranks_per_host), idle)
        found[name] = record
    return found


def _turn(side: Side, batches: Sequence[Batch], losses: list[torch.Tensor]) -> harness.Turn:
    def turn(number: int) -> tuple[float]:
        begin = time.perf_counter()
        loss = side.step(batches[number])
        end = time.perf_counter()
        losses.append(loss)
        return (end - begin,)

    return turn


def _wire(act: Callable[[], Any], ranks_per_host: int) -> dict[str, list[int]]:
    """Return the bytes that each host receives and sends while its ranks act. Collective."""
    dist.barrier()
    time.sleep(QUIET)
    before = wire_bytes()
    dist.barrier()
    act()
    dist.barrier()
    time.sleep(QUIET)
    counts = [now - then for now, then in zip(wire_bytes(), before, strict=True)]
    hosts = harness.of_all_ranks(counts)[::ranks_per_host]
    return {"received": [host[0] for host in hosts], "sent": [host[1] for host in hosts]}


def _minus(
    counts: Mapping[str, Sequence[int]], idle: Mapping[str, Sequence[int]]
) -> dict[str, list[int]]:
    return {
        key: [max(0, mine - other) for mine, other in zip(counts[key], idle[key], strict=True)]
        for key in counts
    }


def bytes_of_hosts(workload: Workload, name: str, ranks_per_host: int) -> dict[str, Any]:
    """Return the bytes of each host's ranks: "peak" and "held" with gradients after a few steps,
    both beyond what a small model has left of the libraries, and "predicted" by zshard. Collective.

    What zshard holds with gradients is all that it predicts; activations are in the peak alone.
    """
    build_side(name, WORKLOADS[memory.TINY]).step(WORKLOADS[memory.TINY].batch(harness.generator()))
    before = memory.settled()
    side = build_side(name, workload)
    generator = harness.generator()
    sampler = memory.PssSampler()
    for _ in range(MEMORY_STEPS):
        side.zero_grad()
        side.step(workload.batch(generator), zero_grad=False)
        sampler.sample()
    found = {"peak": sampler.stop() - before, "held": memory.settled() - before}
    if hasattr(side.module, "memory"):
        found["predicted"] = side.module.memory("predicted")["total"]
    return {key: _sums(harness.of_all_ranks(mine), ranks_per_host) for key, mine in found.items()}


def _sums(ranks: Sequence[int], ranks_per_host: int) -> list[int]:
    starts = range(0, len(ranks), ranks_per_host)
    return [sum(ranks[start : start + ranks_per_host]) for start in starts]


if __name__ == "__main__":
    harness.start(main)
