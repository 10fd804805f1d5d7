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
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn

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
        mine = self._sums(module)
        self._buffers = mine.buffers
        comm = state_of(module).comms.all
        digests = comm.exchange(_digest(mine))
        if _are_same(digests):
            return
        difference = _difference([Sums(*each) for each in gather(comm, mine)])
        if difference:
            raise api.DivergenceError(
                f"replicas differ: {difference}. Up to {self._every} steps ago, one rank's memory "
                "changed otherwise than the others': resume all ranks from a checkpoint"
            )

    def _sums(self, module: nn.Module) -> Sums:
        state = state_of(module)
        full: dict[str, int] = {}
        shards: dict[str, int] = {}
        units = list(units_of(module))
        apart = [one for one, each in units if each.is_apart(state.comms)]  # other ranks' values
        left = {id(buffer) for one in apart for buffer in one.buffers()}
        for one, each in units:
            if one not in apart and each.has_replicas:
                sums = full if each.unit.replicated else shards
                sums.update(_of_params(each.names, each.unit.params))
        buffers = dict(_of_buffers(module, left))
        changed = [name for name, value in buffers.items() if self._buffers.get(name) != value]
        return Sums(state.comms.shards.rank, full, shards, buffers, changed)


@plain()
def _of_params(names: Sequence[str], params: Sequence[Tensor | None]) -> dict[str, int]:
    return {
        name: checksum(param)
        for name, param in zip(names, params, strict=True)
        if param is not None
    }


def _of_buffers(module: nn.Module, left: Collection[int] = ()) -> Iterator[tuple[str, int]]:
    own = (named for named in module.named_buffers() if id(named[1]) not in left)
    return ((name, checksum(buffer)) for name, buffer in own)


def _digest(sums: Sums) -> bytes:
    """Return 16 bytes that stand for a rank's checksums."""
    kinds = (sums.full, sums.shards, sums.buffers)
    numbers = [sums.shard, *(zlib.crc32(json.dumps(kind).encode()) for kind in kinds)]
    return b"".join(number.to_bytes(4, "little") for number in numbers)


def _are_same(digests: list[bytes]) -> bool:
    """Return whether ranks with the same shard have one digest, and all ranks the same but for what
    depends on the shard."""
    apart = {each[:4] for each in digests}
    everywhere = {each[4:8] + each[12:] for each in digests}
    return len(set(digests)) == len(apart) and len(everywhere) == 1


def _difference(everyone: list[Sums]) -> str | None:
    """Describe the first value that differs between ranks; None if none does."""
    everywhere = [0] * len(everyone)
    found = _first_different("parameter", [each.full for each in everyone], everywhere)
    if not found:
        shards = [each.shard for each in everyone]
        found = _first_different("this shard of parameter", [e.shards for e in everyone], shards)
    if not found:
        own = set(everyone[0].changed).intersection(*(each.changed for each in everyone))
        kept = [{k: v for k, v in each.buffers.items() if k not in own} for each in everyone]
        found = _first_different("buffer", kept, everywhere)
    return found


def _first_different(what: str, sums: list[dict[str, int]], groups: list[int]) -> str | None:
    """groups: for each rank, a number that ranks with the same values have in common."""
    for name in dict.fromkeys(name for each in sums for name in each):
        for group in sorted(set(groups)):
            values = {
                rank: each.get(name)
                for rank, each in enumerate(sums)
                if groups[rank] == group and name in each
            }
            if len(set(values.values())) > 1:
                return f"{what} '{name}' {_who(values)}"
    return None


def _who(values: dict[int, int | None]) -> str:
    """Say which ranks differ: those in the minority, if there is a majority."""
    (common, n), *_ = Counter(values.values()).most_common(1)
    most = [rank for rank, value in values.items() if value == common]
    others = [rank for rank in values if rank not in most]
    if 2 * n > len(values):
        return f"on rank {_listed(others)} is not that of rank {_listed(most)}"
    return f"is not the same on ranks {_listed(list(values))}"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
