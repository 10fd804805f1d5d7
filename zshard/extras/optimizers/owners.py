"""Assigns matrices to ranks for optimizers that need whole matrices, and plans the transfers.

Each rank holds some elements of a matrix: its shard, or with no_shard all of them. One rank, the
matrix's owner, gets the others' elements, computes, and sends each holder its elements of the
result. Owners are chosen so that all ranks compute for about as long: the most expensive matrix
first, each to the rank with the least work so far.

Matrices travel in batches, so that what a rank holds of them at a time is bounded, and one transfer
carries many. Transfer t carries the elements of batch t to their owners and the results of batch
t - 2 back; meanwhile the owners compute batch t - 1.

All ranks make the same plan from the same facts, without communicating.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = ["ALIGN", "Matrix", "Portion", "StepPlan", "assigned", "room_of"]

ALIGN = 64
"""Bytes: where elements begin in a transfer."""


@dataclass(frozen=True)
class Matrix:
    """A parameter that its owner needs as a whole."""

    numel: int  # of the full parameter
    dtype: torch.dtype  # of the elements that travel
    n_inputs: int  # tensors of the parameter's shape that go to the owner
    cost: int  # of computing, in any unit
    ranges: tuple[tuple[int, int], ...]  # by rank: the first element that it holds, their number


class Portion(NamedTuple):
    """Elements of a matrix that one rank sends another."""

    matrix: int
    begin: int
    numel: int
    source: int
    target: int
    is_result: bool
    nbytes: int


def assigned(costs: Sequence[int], ranks: int, turns: Sequence[int] = ()) -> list[int]:
    """Return the owner of each matrix: the longest-processing-time rule. turns: those of a lower
    turn come first, so that later ones do not change their owners."""
    loads = [0] * ranks
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (turns[i] if turns else 0, -costs[i])):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += costs[i]
    return owners


class StepPlan:
    """Batches and transfers.

    owners: the rank of each matrix. limit: bytes of a rank's own matrices in a batch; a larger
        matrix is a batch by itself.
    """

    def __init__(
        self, matrices: Sequence[Matrix], owners: Sequence[int], ranks: int, limit: int
    ) -> None:
        self.matrices, self.owners = matrices, owners
        self.ranks = ranks
        self.batches = self._batches(limit)
        self.transfers = [
            [piece for i in self.batch(t) for piece in self._inputs(i)]
            + [piece for i in self.batch(t - 2) for piece in self._results(i)]
            for t in range(len(self.batches) + 2)
        ]
        """Without what stays on its rank."""

    @functools.cached_property
    def most_sent(self) -> int:
        """Return the most bytes that a rank sends in a transfer, of each result only once."""
        sent = [0]
        for pieces in self.transfers:
            for rank in range(self.ranks):
                once = {p._replace(target=-1) for p in pieces if p.source == rank}
                sent.append(sum(room_of(piece) for piece in once))
        return max(sent)

    def batch(self, number: int) -> list[int]:
        """Return the matrices of a batch; none for a number out of range."""
        return self.batches[number] if 0 <= number < len(self.batches) else []

    def _batches(self, limit: int) -> list[list[int]]:
        queues: list[list[int]] = [[] for _ in range(self.ranks)]
        for i in sorted(range(len(self.matrices)), key=lambda i: -self.matrices[i].cost):
            queues[self.owners[i]].append(i)
        batches = []
        while any(queues):
            batch: list[int] = []
            for queue in queues:
                filled = 0
                while queue and (filled == 0 or filled + self._bytes(queue[0]) <= limit):
                    filled += max(1, self._bytes(queue[0]))
                    batch.append(queue.pop(0))
            batches.append(sorted(batch))
        return batches

    def _bytes(self, i: int) -> int:
        matrix = self.matrices[i]
        return matrix.numel * matrix.n_inputs * matrix.dtype.itemsize

    def _inputs(self, i: int) -> list[Portion]:
        matrix, owner = self.matrices[i], self.owners[i]
        size = matrix.n_inputs * matrix.dtype.itemsize
        return [
            Portion(i, begin, numel, rank, owner, False, numel * size)
            for rank, (begin, numel) in self.senders(i)
            if rank != owner
        ]

    def _results(self, i: int) -> list[Portion]:
        matrix, owner = self.matrices[i], self.owners[i]
        return [
            Portion(i, begin, numel, owner, rank, True, numel * matrix.dtype.itemsize)
            for rank, (begin, numel) in enumerate(matrix.ranges)
            if rank != owner and numel > 0
        ]

    def senders(self, i: int) -> list[tuple[int, tuple[int, int]]]:
        """Return (rank, range) of those whose elements the owner takes. Replicas hold the same
        ones: the owner takes its own, and others from the nearest rank."""
        matrix, owner = self.matrices[i], self.owners[i]
        nearest: dict[tuple[int, int], int] = {}
        for rank in sorted(range(self.ranks), key=lambda rank: abs(rank - owner)):
            if matrix.ranges[rank][1] > 0:
                nearest.setdefault(matrix.ranges[rank], rank)
        if sum(numel for _, numel in nearest) != matrix.numel:
            raise RuntimeError(f"the shards of matrix {i} do not add up to it; please report this")
        return sorted((rank, elements) for elements, rank in nearest.items())


def room_of(piece: Portion) -> int:
    """Return its bytes in a transfer, padded."""
    return -(-piece.nbytes // ALIGN) * ALIGN
