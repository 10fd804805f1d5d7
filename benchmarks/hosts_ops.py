"""A rank's part of hosts.py --collectives: which of gloo's ways of moving bytes fills the wire?

Each operation gets the work of an all-gather, a reduction or a swap of a tensor of N
bytes, and its speed is (the least bytes that a host must send for that) / time. An operation that
fills the wire reaches the wire's rate; one that sends bytes twice, or one by one, does not.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import harness
from benchmarks.collectives import all_gather, reduce_scatter
from benchmarks.harness import MIB, Spread

MODULE = "benchmarks.hosts_ops"
LIMIT = 6.0
"""Seconds for the rounds of one operation of one size; at least one round is timed."""

Works = list[Any]


@dataclass(frozen=True)
class Place:
    """Where a rank stands: `hosts` times `ranks`, numbered host by host."""

    hosts: int
    ranks: int
    rank: int

    @property
    def world(self) -> int:
        return self.hosts * self.ranks


@dataclass(frozen=True)
class Operation:
    """start: begins it with (this rank's place, the full tensor, room as large, the group) and
    returns what is to be waited for. factor: the bytes that a host must send, over N."""

    start: Callable[[Place, Tensor, Tensor, Any], Works]
    factor: Callable[[Place], float]


def once(place: Place) -> float:
    """An all-gather or a reduce-scatter: all of the other hosts' shards, once per host."""
    return (place.hosts - 1) / place.hosts


def twice(place: Place) -> float:
    return 2 * once(place)


def by_rank(place: Place) -> float:
    """An exchange in which each rank has something for each other: it cannot be shared."""
    return place.ranks * once(place)


def part(place: Place, tensor: Tensor, index: int) -> Tensor:
    return tensor.chunk(place.world)[index]


def _all_gather(place: Place, full: Tensor, room: Tensor, group: Any) -> Works:
    return [all_gather(room, part(place, full, place.rank), group=group, async_op=True)]


def _reduce_scatter(place: Place, full: Tensor, room: Tensor, group: Any) -> Works:
    mine = part(place, room, place.rank)
    return [reduce_scatter(mine, full, group=group, async_op=True)]


def _all_reduce(_: Place, full: Tensor, __: Tensor, group: Any) -> Works:
    return [dist.all_reduce(full, group=group, async_op=True)]


def _all_to_all(_: Place, full: Tensor, room: Tensor, group: Any) -> Works:
    return [dist.all_to_all_single(room, full, group=group, async_op=True)]


def _broadcasts(place: Place, full: Tensor, _: Tensor, group: Any) -> Works:
    """An all-gather of one broadcast per rank, all at the same time."""
    return [
        dist.broadcast(part(place, full, root), root, group=group, async_op=True)
        for root in range(place.world)
    ]


def _pairs(place: Place, full: Tensor, room: Tensor, group: Any) -> Works:
    """An exchange as all_to_all's, of a send and a receive for each other rank."""
    works: Works = []
    for step in range(1, place.world):
        to, source = (place.rank + step) % place.world, (place.rank - step) % place.world
        works.append(dist.irecv(part(place, room, source), source, group=group))
        works.append(dist.isend(part(place, full, to), to, group=group))
    return works


def _ring(place: Place, full: Tensor, _: Tensor, group: Any) -> Works:
    """An all-gather in world - 1 steps, each from the rank before to the one behind."""
    after, before = (place.rank + 1) % place.world, (place.rank - 1) % place.world
    for step in range(place.world - 1):
        come = part(place, full, (place.rank - step - 1) % place.world)
        go = part(place, full, (place.rank - step) % place.world)
        works = [dist.irecv(come, before, group=group), dist.isend(go, after, group=group)]
        for work in works:
            work.wait()
    return []


def _swap(place: Place, full: Tensor, room: Tensor, group: Any) -> Works:
    """Each rank sends its shard to the rank of its number on the next host: one step of an
    all-gather whose bytes then go on within the host."""
    to = (place.rank + place.ranks) % place.world
    source = (place.rank - place.ranks) % place.world
    mine = part(place, full, place.rank)
    return [
        dist.irecv(part(place, room, source), source, group=group),
        dist.isend(mine, to, group=group),
    ]


OPERATIONS = {
    "all_gather_into_tensor": Operation(_all_gather, once),
    "reduce_scatter_tensor": Operation(_reduce_scatter, once),
    "all_reduce": Operation(_all_reduce, twice),
    "all_to_all_single": Operation(_all_to_all, by_rank),
    "broadcasts": Operation(_broadcasts, once),
    "pairs": Operation(_pairs, by_rank),
    "ring": Operation(_ring, once),
    "swap": Operation(_swap, lambda place: place.ranks / place.world),
}
ON_GROUPS = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single")
ON_GROUPS += ("swap",)
"""Also run cut into pieces, on several process groups at the same time."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Run by benchmarks.hosts --collectives.")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--ranks-per-host", type=int, required=True)
    parser.add_argument("--mib", nargs="+", type=float, required=True)
    parser.add_argument("--groups", nargs="+", type=int, required=True)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    with harness.process_group() as rank:
        place = Place(dist.get_world_size() // args.ranks_per_host, args.ranks_per_host, rank)
        groups = [dist.new_group() for _ in range(max(args.groups))]
        found = []
        for mib in args.mib:
            for name, operation in OPERATIONS.items():
                for count in args.groups if name in ON_GROUPS else [1]:
                    record = measure(operation, place, groups[:count], mib, args.rounds)
                    found.append({"operation": name, "groups": count, "mib": mib, **record})
    if rank == 0:
        harness.write_json(args.out, found)


def measure(
    operation: Operation, place: Place, groups: list[Any], mib: float, rounds: int
) -> dict[str, Any]:
    """Return ms and GB/s of an operation, cut into one piece per group. Collective."""
    numbers = int(mib * MIB) // 4
    full, room = torch.ones(numbers), torch.empty(numbers)
    pieces = list(zip(full.chunk(len(groups)), room.chunk(len(groups)), groups, strict=True))
    times: list[float] = []
    spent = 0.0
    while len(times) < rounds + 1 and (len(times) < 2 or spent < LIMIT):  # the first warms up
        dist.barrier()
        begin = time.perf_counter()
        works = [work for piece in pieces for work in operation.start(place, *piece)]
        for work in works:
            work.wait()
        slowest = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(float(slowest))
        spent += times[-1]
    spread = Spread.of([seconds * 1e3 for seconds in times[1:]])
    least = operation.factor(place) * numbers * 4
    return {
        "ms": spread.as_dict(),
        "least_bytes": round(least),
        "gb_per_s": least / spread.median / 1e6,
    }


if __name__ == "__main__":
    harness.start(main)
