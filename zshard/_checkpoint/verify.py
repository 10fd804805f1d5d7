"""Are a checkpoint's files what they were when they were saved?

The one idea: the manifest has a checksum of each block of each file, so the blocks can be shared
out among the ranks, and what is wrong can be named: the file, the bytes, the tensors there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

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
