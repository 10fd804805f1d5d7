"""FSDP(check_replicas=N): are the values that several ranks hold still the same on all of them?

Ranks hold the same parameters with no_shard, and the same shards in the replicas of a hybrid
strategy. Nothing compares those: a bit that flips in one rank's memory stays there, and its model
trains apart. So every N steps the ranks compare checksums of them and of buffers.

A rank may compute a buffer from its own data, as BatchNorm does. So buffers that every rank has
changed since the last look are not compared.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

from torch import nn

from zshard import api
from zshard.api import checksum, gather, plain, state_of, units_of


class Sums(NamedTuple):
    """A rank's checksums, by name. shard: which shard of the model the rank holds. changed: buffers
    that are not as they were at the last look."""

    shard: int
    full: dict[str, int]  # of parameters that all ranks have in full
    shards: dict[str, int]  # of this rank's shards, if other ranks have the same
    buffers: dict[str, int]
    changed: list[str]


class ReplicaCheck:
    """Compares a model's replicas every few steps."""

    def __init__(self, module: nn.Module, every: int) -> None:
        self._every, self._steps = every, 0
        self._buffers = dict(_of_buffers(module))

    def count_step(self, module: nn.Module) -> None:
        """Count a step, and compare if it is due. Collective then. Raises DivergenceError."""
        self._steps += 1
        if self._steps % self._every:
            return
        sums = self._sums(module)
        self._buffers = sums.buffers
        comm = state_of(module).comms.all
        kinds = (sums.full, sums.shards, sums.buffers)
        numbers = [sums.shard, *(zlib.crc32(json.dumps(kind).encode()) for kind in kinds)]
        digests = comm.exchange(b"".join(number.to_bytes(4, "little") for number in numbers))
        # One digest per shard, and the same on all ranks but for what depends on the shard.
        shards, same = {each[:4] for each in digests}, {each[4:8] + each[12:] for each in digests}
        if len(set(digests)) == len(shards) and len(same) == 1:
            return
        difference = _difference([Sums(*each) for each in gather(comm, sums)])
        if difference:
            raise api.DivergenceError(
                f"replicas differ: {difference}: resume all ranks from a checkpoint of more than "
                f"{self._every} steps ago"
            )

    def _sums(self, module: nn.Module) -> Sums:
        state = state_of(module)
        full: dict[str, int] = {}
        shards: dict[str, int] = {}
        units = list(units_of(module))
        apart = [unit for unit, of_unit in units if of_unit.is_apart(state.comms)]  # others' values
        left = {id(buffer) for unit in apart for buffer in unit.buffers()}
        for unit, of_unit in units:
            if unit not in apart and of_unit.has_replicas:
                params = zip(of_unit.names, of_unit.unit.params, strict=True)
                sums = full if of_unit.unit.replicated else shards
                with plain():
                    sums.update({name: checksum(p) for name, p in params if p is not None})
        buffers = dict(_of_buffers(module, left))
        changed = [name for name, value in buffers.items() if self._buffers.get(name) != value]
        return Sums(state.comms.shards.rank, full, shards, buffers, changed)


def _of_buffers(module: nn.Module, left: Collection[int] = ()) -> Iterator[tuple[str, int]]:
    return ((name, checksum(b)) for name, b in module.named_buffers() if id(b) not in left)


def _difference(everyone: list[Sums]) -> str | None:
    """Describe the first value that differs between ranks; None if none does."""
    changed = set.intersection(*(set(each.changed) for each in everyone))
    buffers = [{k: v for k, v in each.buffers.items() if k not in changed} for each in everyone]
    everywhere = [0] * len(everyone)
    kinds = (  # the values, and for each rank a number that ranks with the same ones share
        ("parameter", [each.full for each in everyone], everywhere),
        ("this shard of parameter", [e.shards for e in everyone], [e.shard for e in everyone]),
        ("buffer", buffers, everywhere),
    )
    for what, sums, groups in kinds:
        for name in dict.fromkeys(name for each in sums for name in each):
            for group in sorted(set(groups)):
                ranks = [r for r, each in enumerate(sums) if groups[r] == group and name in each]
                values = {rank: sums[rank][name] for rank in ranks}
                if len(set(values.values())) > 1:
                    return f"{what} '{name}' {_who(values)}"
    return None


def _who(values: dict[int, int]) -> str:
    """Say which ranks differ: those in the minority, if there is a majority."""
    (common, n), *_ = Counter(values.values()).most_common(1)
    most = ", ".join(str(rank) for rank, value in values.items() if value == common)
    others = ", ".join(str(rank) for rank, value in values.items() if value != common)
    if 2 * n > len(values):
        return f"on rank {others} is not that of rank {most}"
    return f"is not the same on ranks {', '.join(map(str, values))}"
