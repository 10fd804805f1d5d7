"""The files of a checkpoint whose hosts share no disk: each lies in pieces in part files.

Each rank has written what it holds into a part file of its own, one run of bytes after the other;
the manifest (`Manifest.parts`) says which run is where. A Spread puts the files together again:
readers of safetensors files see whole files, whose bytes come from part files here or, over the
wire, on other hosts. Several ranks may have written the same run; the nearest one is read.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from zshard._errors import CheckpointError
from zshard.checkpoint.manifest import NAME, Block, Manifest, PartRecord
from zshard.checkpoint.safetensors import OpenFile, SafetensorsFile

_HERE, _ELSEWHERE, _LOST = range(3)  # nearest first

_File = TypeVar("_File", bound=OpenFile)

Read = Callable[[str, memoryview, int], None]
"""Reads a part file of another host: name, memory to fill, first byte."""


class RunPlace(NamedTuple):
    """Where a run of bytes of a file is."""

    begin: int  # in the file
    nearness: int
    part: str  # a part file
    at: int  # the offset of the run in the part file
    length: int


class Spread:
    """A checkpoint in parts, as this process can read it. close() closes the part files here."""

    def __init__(
        self,
        path: str,
        manifest: Manifest,
        here: Mapping[str, str],
        elsewhere: Iterable[str] = (),
        read: Read | None = None,
    ) -> None:
        """path: names the checkpoint in messages.
        here: the paths of part files on this host, by name; elsewhere: the names of those that
        `read` can read. Raises CheckpointError unless runs fill the files without overlaps.
        """
        self.path, self.manifest = path, manifest
        self.here = dict(here)
        self._elsewhere = frozenset(elsewhere) - self.here.keys()
        self._read = read
        self._opened: dict[str, PartFile] = {}
        self._places = self._all_places()

    def open(self, name: str, kind: type[_File]) -> _File:
        """Open a file of the checkpoint as a `kind` of OpenFile."""
        size = self.manifest.whole[name]
        return kind(os.path.join(self.path, name), source=_Pieces(self, name, size))

    def part(self, name: str) -> PartFile:
        """Return an open part file of this host."""
        if name not in self._opened:
            self._opened[name] = PartFile(self, name)
        return self._opened[name]

    def blocks(self, masks: Mapping[str, int]) -> list[Block]:
        """Return blocks of part files here: of each one, those whose bits its mask has."""
        records = self.manifest.files
        return [
            Block(self.part(name), records[name], number)
            for name, mask in sorted(masks.items())
            for number in range(len(records[name].checksums))
            if mask >> number & 1
        ]

    def close(self) -> None:
        for file in self._opened.values():
            file.close()
        self._opened.clear()

    def places(self, file: str, begin: int, end: int) -> Iterator[RunPlace]:
        """Yield where bytes `begin` to `end` of a file are, in order, cut to this range."""
        all_places = self._places[file]
        first = bisect.bisect_right(all_places, begin, key=lambda place: place.begin) - 1
        for place in itertools.islice(all_places, max(first, 0), None):
            if place.begin >= end:
                return
            start, stop = max(begin, place.begin), min(end, place.begin + place.length)
            if start < stop:
                yield place._replace(
                    begin=start, at=place.at + start - place.begin, length=stop - start
                )

    def read(self, place: RunPlace, memory: memoryview) -> None:
        """Fill `memory` with the bytes of a place."""
        if place.nearness == _HERE:
            self.part(place.part).read_into(memory, place.at)
        elif place.nearness == _ELSEWHERE and self._read is not None:
            self._read(place.part, memory, place.at)
        else:
            raise CheckpointError(f"'{self.path}' is incomplete: {self.missing()}")

    # --- what is missing --------------------------------------------------------------------------

    def is_complete(self) -> bool:
        """Return whether all bytes can be read."""
        return not any(p.nearness == _LOST for places in self._places.values() for p in places)

    def missing(self) -> str:
        """Return which hosts' part files cannot be read, what they contain, and what to do."""
        lost = [
            (file, place)
            for file, places in self._places.items()
            for place in places
            if place.nearness == _LOST
        ]
        hosts: dict[str, list[int]] = {}
        for name in dict.fromkeys(place.part for _, place in lost):
            part = self.manifest.parts[name]
            hosts.setdefault(part.host, []).append(part.rank)
        missing = "; ".join(
            f"the part files of host '{host}' ({_ranks(ranks)}) are missing"
            for host, ranks in hosts.items()
        )
        size = sum(place.length for _, place in lost)
        return (
            f"{missing}, which contain {size:,} bytes{self._names_of(lost)}: start these hosts "
            "again, or copy their part files into the checkpoint's folder on any host; "
            "save(replicas=1) keeps a copy on another host"
        )

    def _names_of(self, lost: Sequence[tuple[str, RunPlace]]) -> str:
        names: dict[str, None] = {}
        headers: dict[str, SafetensorsFile] = {}
        for file, place in lost:
            if file.endswith(".safetensors"):
                with contextlib.suppress(CheckpointError, OSError):
                    opened = headers.setdefault(file, self.open(file, SafetensorsFile))
                    names.update(dict.fromkeys(opened.in_range(*_range(place))))
        if not names:
            return ""
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f" of {', '.join(list(names)[:3])}{more}"

    # --- the places of files ----------------------------------------------------------------------

    def _nearness(self, part: str) -> int:
        return _HERE if part in self.here else _ELSEWHERE if part in self._elsewhere else _LOST

    def _all_places(self) -> dict[str, list[RunPlace]]:
        """Return where each file's bytes are, in order; of equal runs, the nearest."""
        found: dict[str, list[RunPlace]] = {file: [] for file in self.manifest.whole}
        for name, part in self.manifest.parts.items():
            at = 0
            for file, runs in part.runs.items():
                for begin, length in runs:
                    found[file].append(RunPlace(begin, self._nearness(name), name, at, length))
                    at += length
        return {file: self._chain(file, sorted(places)) for file, places in found.items()}

    def _chain(self, file: str, places: Sequence[RunPlace]) -> list[RunPlace]:
        """Return places that contain each byte of a file once, in order."""
        made: list[RunPlace] = []
        end = 0
        for place in places:
            if made and _range(place) == _range(made[-1]):
                continue
            if place.begin != end:
                break
            made.append(place)
            end += place.length
        if end != self.manifest.whole[file]:
            where = os.path.join(self.path, NAME)
            raise CheckpointError(
                f"'{where}' is not a valid manifest: parts do not contain byte {end} of '{file}' "
                "exactly once"
            )
        return made


def _range(place: RunPlace) -> tuple[int, int]:
    return place.begin, place.begin + place.length


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class _Pieces:
    """The bytes of a file of a Spread."""

    def __init__(self, spread: Spread, name: str, size: int) -> None:
        self._spread, self._name, self.size = spread, name, size

    def read(self, ranges: list[tuple[int, memoryview]], /) -> None:
        for offset, memory in ranges:
            if offset + len(memory) > self.size:
                raise ValueError(f"'{self._name}' ends at byte {self.size}")
            for place in self._spread.places(self._name, offset, offset + len(memory)):
                begin = place.begin - offset
                self._spread.read(place, memory[begin : begin + place.length])

    def close(self) -> None:
        """Do nothing: the Spread closes the part files."""


class PartFile(OpenFile):
    """A part file on this host."""

    def __init__(self, spread: Spread, name: str) -> None:
        super().__init__(spread.here[name], follow=False)
        self._spread, self._part = spread, spread.manifest.parts[name]

    def in_range(self, begin: int, end: int) -> list[str]:
        """Return the tensors in these bytes, as SafetensorsFile.in_range() does for the file."""
        there: dict[str, None] = {}
        with contextlib.suppress(CheckpointError, OSError):
            for file, first, last in self._part.files_in(begin, end):
                if file.endswith(".safetensors"):
                    opened = self._spread.open(file, SafetensorsFile)
                    there.update(dict.fromkeys(opened.in_range(first, last)))
        return list(there)


def part_files_in(folder: str, parts: Mapping[str, PartRecord]) -> dict[str, str]:
    """Return the paths of those part files that a folder has, with the size of their runs."""
    found = {}
    for name, part in parts.items():
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            if os.lstat(path).st_size == part.size:
                found[name] = path
    return found
