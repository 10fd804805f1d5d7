"""Verify the files of a checkpoint against their checksums.

The manifest has a checksum of each block of each file, so the ranks can divide the
blocks among them, and an error can name the file, the bytes and the tensors. If only one host will
read a block, that host verifies it: then the block is in its page cache when it is read, and comes
from the disk or over the network only once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from zshard import _core
from zshard._errors import CheckpointError
from zshard.checkpoint.manifest import BLOCK, FileRecord
from zshard.checkpoint.safetensors import OpenFile, SafetensorsFile
from zshard.ranks.agreement import gather_bytes

_T = TypeVar("_T")
_RUN = 16  # blocks per call


class BlockRun(NamedTuple):
    """Blocks `first` to `end` of a file."""

    file: OpenFile
    record: FileRecord
    first: int
    end: int

    @property
    def size(self) -> int:
        """Its bytes."""
        return min(self.end * BLOCK, self.record.size) - self.first * BLOCK


def head_runs(files: Mapping[str, OpenFile], records: Mapping[str, FileRecord]) -> list[BlockRun]:
    """Return the blocks that opening the files reads: headers, and complete files that are not
    safetensors files. files, records: by file name."""
    heads = [(file, records[name], _heads(file, records[name])) for name, file in files.items()]
    return [BlockRun(file, record, 0, end) for file, record, end in heads if end > 0]


def data_runs(files: Mapping[str, OpenFile], records: Mapping[str, FileRecord]) -> list[BlockRun]:
    """Return all other blocks."""
    return [
        BlockRun(file, records[name], first, min(first + _RUN, len(records[name].checksums)))
        for name, file in files.items()
        for first in range(_heads(file, records[name]), len(records[name].checksums), _RUN)
    ]


def _heads(file: OpenFile, record: FileRecord) -> int:
    size = file.data if isinstance(file, SafetensorsFile) else record.size
    return -(-size // BLOCK)


def own_runs(
    comm: _core.Comm,
    files: Mapping[str, OpenFile],
    records: Mapping[str, FileRecord],
    wanted: Iterable[tuple[OpenFile, int, int]],
    host: str,
) -> list[BlockRun]:
    """Return the part of data_runs() that this rank verifies. Collective. The ranks of a host
    divide the blocks that only this host wants, in contiguous stretches, which suit disks; all
    ranks divide the rest.

    wanted: (file, first byte, byte after the last) of what this rank will read. It decides which
        rank verifies a block, not whether it is verified: the ranks verify each block once.
    host: the name of this rank's host.
    """
    places = _Places(files, records)
    marked = places.marked(wanted)
    told = gather_bytes(comm, marked + host.encode())
    hosts: dict[bytes, list[int]] = {}  # their ranks
    for rank, data in enumerate(told):
        hosts.setdefault(data[len(marked) :], []).append(rank)
    masks = dict.fromkeys(hosts, 0)
    for data in told:
        masks[data[len(marked) :]] |= int.from_bytes(data[: len(marked)], "little")
    once = twice = 0
    for mask in masks.values():
        twice |= once & mask
        once |= mask
    alone = once & ~twice & places.data
    near = hosts[host.encode()]
    mine = [
        *share(places.of(masks[host.encode()] & alone), near.index(comm.rank), len(near)),
        *share(places.of(places.data & ~alone), comm.rank, comm.world),
    ]
    return list(places.runs(mine))


class _Places:
    """All blocks of some files, numbered one file after the other; a set of blocks is an integer's
    bits."""

    def __init__(self, files: Mapping[str, OpenFile], records: Mapping[str, FileRecord]) -> None:
        self._files = [(file, records[name]) for name, file in files.items()]
        counts = [len(record.checksums) for _, record in self._files]
        self._count = sum(counts)
        self._begins = [sum(counts[:number]) for number in range(len(counts))]
        self._begin_of = {
            id(file): begin for (file, _), begin in zip(self._files, self._begins, strict=True)
        }
        self.data = self._number(
            (file, _heads(file, record) * BLOCK, record.size) for file, record in self._files
        )
        """The blocks of data_runs()."""

    def marked(self, ranges: Iterable[tuple[OpenFile, int, int]]) -> bytes:
        """Return the blocks that the ranges touch, as bytes."""
        return self._number(ranges).to_bytes(-(-self._count // 8), "little")

    def of(self, number: int) -> list[int]:
        """Return the block numbers in a set."""
        return [at for at, bit in enumerate(f"{number:b}"[::-1]) if bit == "1"]

    def runs(self, blocks: Iterable[int]) -> Iterator[BlockRun]:
        """Yield the blocks with these numbers, in order."""
        marks = bytearray(b"0" * self._count)
        for at in blocks:
            marks[at] = ord("1")
        for (file, record), begin in zip(self._files, self._begins, strict=True):
            own = marks[begin : begin + len(record.checksums)]
            for found in re.finditer(b"1{1,%d}" % _RUN, own):
                yield BlockRun(file, record, *found.span())

    def _number(self, ranges: Iterable[tuple[OpenFile, int, int]]) -> int:
        marks = bytearray(b"0" * self._count)
        for file, begin, end in ranges:
            if begin < end and id(file) in self._begin_of:
                first = self._begin_of[id(file)]
                low, high = first + begin // BLOCK, first - (-end // BLOCK)
                marks[low:high] = b"1" * (high - low)
        return int(marks[::-1] or b"0", 2)


def share(things: Sequence[_T], rank: int, world: int) -> Sequence[_T]:
    """Return the contiguous share of `things` that `rank` checks; all shares are about equal."""
    return things[len(things) * rank // world : len(things) * (rank + 1) // world]


def check(runs: Iterable[BlockRun], done: Callable[[int], object] | None = None) -> None:
    """Verify the runs. Raise CheckpointError for the first block with a wrong checksum.

    done: called with the bytes of each run.
    """
    for run in runs:
        begin = run.first * BLOCK
        for offset, length, crc in run.file.check(begin, begin + run.size, BLOCK):
            block = offset // BLOCK
            if crc != run.record.checksums[block]:
                raise CheckpointError(_damage(run.file, block, offset, offset + length))
        if done is not None:
            done(run.size)


def _damage(file: OpenFile, block: int, begin: int, end: int) -> str:
    text = f"'{file.path}' is damaged: checksum mismatch in bytes {begin} to {end} (block {block})"
    there = file.in_range(begin, end) if isinstance(file, SafetensorsFile) else []
    if not there:
        return text
    more = f" and {len(there) - 3} more" if len(there) > 3 else ""
    return f"{text}, which contain {', '.join(there[:3])}{more}"
