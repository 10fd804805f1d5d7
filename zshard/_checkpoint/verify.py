"""Are a checkpoint's files what they were when they were saved?

The one idea: the manifest has a checksum of each block of each file, so the blocks can be shared
out among the ranks, and what is wrong can be named: the file, the bytes, the tensors there. A block
that one host alone is going to read is checked there: then that host has it in memory already, and
it comes from the disk, or over the network, once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from zshard import _core
from zshard._agree import gather_bytes
from zshard._checkpoint.manifest import BLOCK, CheckpointError, FileRecord
from zshard._checkpoint.safetensors import File, SafetensorsFile

_T = TypeVar("_T")
_RUN = 16  # blocks that are checked by one call


class Run(NamedTuple):
    """Blocks `first` to `end` of a file."""

    file: File
    record: FileRecord
    first: int
    end: int

    @property
    def size(self) -> int:
        """Bytes."""
        return min(self.end * BLOCK, self.record.size) - self.first * BLOCK


def head_runs(files: Mapping[str, File], records: Mapping[str, FileRecord]) -> list[Run]:
    """Those blocks of the files, which go by their names, that have been read when they are opened:
    headers, and whole files that are no safetensors."""
    heads = [(file, records[name], _heads(file, records[name])) for name, file in files.items()]
    return [Run(file, record, 0, end) for file, record, end in heads if end > 0]


def data_runs(files: Mapping[str, File], records: Mapping[str, FileRecord]) -> list[Run]:
    """All other blocks."""
    return [
        Run(file, records[name], first, min(first + _RUN, len(records[name].checksums)))
        for name, file in files.items()
        for first in range(_heads(file, records[name]), len(records[name].checksums), _RUN)
    ]


def _heads(file: File, record: FileRecord) -> int:
    size = file.data if isinstance(file, SafetensorsFile) else record.size
    return -(-size // BLOCK)


def own_runs(
    comm: _core.Comm,
    files: Mapping[str, File],
    records: Mapping[str, FileRecord],
    wanted: Iterable[tuple[File, int, int]],
    host: str,
) -> list[Run]:
    """What this rank is to check of data_runs(). What one host alone wants, its ranks share out
    among them, a stretch each, as disks like it; the rest all ranks. Collective.

    wanted: (file, first byte, byte behind the last) of what this rank is going to read. It says who
        checks a block, not whether one is checked: the ranks check all of them, each once.
    host: the name of this rank's.
    """
    places = _Places(files, records)
    marked = places.marked(wanted)
    told = gather_bytes(comm, marked + host.encode())
    hosts: dict[bytes, list[int]] = {}  # the ranks of each
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
    """All blocks of some files by places, file behind file; some of them as bits of one number."""

    def __init__(self, files: Mapping[str, File], records: Mapping[str, FileRecord]) -> None:
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

    def marked(self, ranges: Iterable[tuple[File, int, int]]) -> bytes:
        """The blocks that the ranges touch."""
        return self._number(ranges).to_bytes(-(-self._count // 8), "little")

    def of(self, number: int) -> list[int]:
        """The places of its blocks."""
        return [at for at, bit in enumerate(f"{number:b}"[::-1]) if bit == "1"]

    def runs(self, blocks: Iterable[int]) -> Iterator[Run]:
        """The blocks at these places, in order."""
        marks = bytearray(b"0" * self._count)
        for at in blocks:
            marks[at] = ord("1")
        for (file, record), begin in zip(self._files, self._begins, strict=True):
            own = marks[begin : begin + len(record.checksums)]
            for found in re.finditer(b"1{1,%d}" % _RUN, own):
                yield Run(file, record, *found.span())

    def _number(self, ranges: Iterable[tuple[File, int, int]]) -> int:
        marks = bytearray(b"0" * self._count)
        for file, begin, end in ranges:
            if begin < end and id(file) in self._begin_of:
                first = self._begin_of[id(file)]
                low, high = first + begin // BLOCK, first - (-end // BLOCK)
                marks[low:high] = b"1" * (high - low)
        return int(marks[::-1] or b"0", 2)


def share(things: Sequence[_T], rank: int, world: int) -> Sequence[_T]:
    """What `rank` is to check of all things: as many as the others, side by side."""
    return things[len(things) * rank // world : len(things) * (rank + 1) // world]


def check(runs: Iterable[Run], done: Callable[[int], object] | None = None) -> None:
    """Reads the runs. CheckpointError for the first block that is not what was saved.

    done: is told the bytes of each run.
    """
    for run in runs:
        begin = run.first * BLOCK
        for offset, length, crc in run.file.check(begin, begin + run.size, BLOCK):
            block = offset // BLOCK
            if crc != run.record.checksums[block]:
                raise CheckpointError(_damage(run.file, block, offset, offset + length))
        if done is not None:
            done(run.size)


def _damage(file: File, block: int, begin: int, end: int) -> str:
    text = (
        f"'{file.path}' is damaged: bytes {begin} to {end} (block {block}) are not what was saved"
    )
    there = file.in_range(begin, end) if isinstance(file, SafetensorsFile) else []
    if not there:
        return text
    more = f" and {len(there) - 3} more" if len(there) > 3 else ""
    return f"{text}; {', '.join(there[:3])}{more} lie there"
