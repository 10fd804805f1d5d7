"""The files of a checkpoint whose hosts share no disk: each lies in pieces in part files.

Each rank has written what it holds into a part file of its own, one run of bytes after the other;
the manifest's entry `parts` says which run is where. A Spread puts the files together again:
readers of safetensors files see whole files, whose bytes come from part files here or, over the
wire, on other hosts. Several ranks may have written the same run; the nearest one is read.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from zshard import api
from zshard.api import NAME, CheckpointError, FileBlocks, Manifest, OpenFile, SafetensorsFile

_HERE, _ELSEWHERE, _LOST = range(3)  # nearest first

_File = TypeVar("_File", bound=OpenFile)

Read = Callable[[str, memoryview, int], None]
"""Reads a part file of another host: name, memory to fill, first byte."""


class PartRecord(NamedTuple):
    """A part file: runs of bytes of the checkpoint's files, one after the other."""

    host: str  # the name of the host that wrote it
    rank: int  # that wrote it
    # By file, in the order in which the part file has them: offset in the file, and length.
    runs: Mapping[str, Sequence[tuple[int, int]]]

    @property
    def size(self) -> int:
        """Its bytes."""
        return sum(length for runs in self.runs.values() for _, length in runs)

    def files_in(self, begin: int, end: int) -> Iterator[tuple[str, int, int]]:
        """Yield (file, first byte, byte after the last) of the runs in a range of its bytes."""
        at = 0
        for file, runs in self.runs.items():
            for offset, length in runs:
                first, last = max(begin, at), min(end, at + length)
                if first < last:
                    yield file, offset + first - at, offset + last - at
                at += length

    @staticmethod
    def of(entry: Mapping[str, Any]) -> PartRecord:
        """Return what `entry` describes. Raise TypeError, KeyError, AttributeError or ValueError
        if it is invalid."""
        host, rank = entry["host"], entry["rank"]
        if not isinstance(host, str) or type(rank) is not int:
            raise TypeError(f"expected a host and a rank, got {host!r:.40} and {rank!r:.40}")
        runs = {
            file: [(int(at), int(n)) for at, n in (each.split("+") for each in text.split())]
            for file, text in entry["runs"].items()
        }
        return PartRecord(host, rank, runs)

    @property
    def entry(self) -> dict[str, Any]:
        """What a manifest has of it. Runs are text, which is shorter than JSON:
        "offset+length offset+length ..."."""
        runs = {file: " ".join(f"{at}+{n}" for at, n in of) for file, of in self.runs.items()}
        return {**self._asdict(), "runs": runs}


def parts_of(manifest: Manifest, path: str) -> dict[str, PartRecord]:
    """Return the part files that a manifest lists, by name. Raise CheckpointError, which names the
    checkpoint at `path`, unless they have the sizes of their runs, which lie within files."""
    try:
        entries = manifest.more.get("parts", {})
        records = {name: PartRecord.of(entry) for name, entry in entries.items()}
        for name, part in records.items():
            if name not in manifest.files or manifest.files[name].size != part.size:
                raise ValueError(f"the part file '{name:.80}' does not have the size of its runs")
            for file, runs in part.runs.items():
                if any(min(run) < 0 or sum(run) > manifest.whole[file] for run in runs):
                    raise ValueError(f"the part file '{name:.80}' exceeds '{file:.80}'")
        return records
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        where = os.path.join(path, NAME)
        raise CheckpointError(f"'{where}' is not a valid manifest: {error!r}") from None


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
        folders: Iterable[str],
        elsewhere: Collection[str] = (),
    ) -> None:
        """path: names the checkpoint in messages.
        folders: where this host has part files; elsewhere: the names of those that read_remote(),
        to be set, can read. Raises CheckpointError unless runs fill the files without overlaps.
        """
        self.path, self.manifest = path, manifest
        self.parts = parts_of(manifest, path)
        self.here: dict[str, str] = {}  # paths of part files on this host
        for folder in folders:
            self.here = part_files_in(folder, self.parts) | self.here
        self.read_remote: Read | None = None
        self._elsewhere = elsewhere
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

    def blocks(self, masks: Mapping[str, int] | None = None) -> FileBlocks:
        """Return blocks of part files here: of each one, those whose bits its mask has; or all."""
        records = self.manifest.files
        masks = dict.fromkeys(self.here, -1) if masks is None else masks
        blocks = FileBlocks()
        for name, mask in sorted(masks.items()):
            numbers = range(len(records[name].checksums))
            blocks.add(self.part(name), records[name], (n for n in numbers if mask >> n & 1))
        return blocks

    def own_blocks(self, comm: api.Comm, wanted: Iterable[tuple[str, int, int]]) -> FileBlocks:
        """Return the blocks of part files that this rank verifies. Collective. Here, where a
        process has opened it alone: all that it has.

        wanted: (file, first byte, byte after the last) of what this rank will read.
        """
        return self.blocks()

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
        elif place.nearness == _ELSEWHERE and self.read_remote is not None:
            self.read_remote(place.part, memory, place.at)
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
        hosts: dict[str, list[str]] = {}
        for name in dict.fromkeys(place.part for _, place in lost):
            part = self.parts[name]
            hosts.setdefault(part.host, []).append(str(part.rank))
        listed = "; ".join(f"host '{host}' (ranks {', '.join(of)})" for host, of in hosts.items())
        names: dict[str, None] = {}
        headers: dict[str, SafetensorsFile] = {}
        for file, place in lost:
            if file.endswith(".safetensors"):
                with contextlib.suppress(CheckpointError, OSError):
                    opened = headers.setdefault(file, self.open(file, SafetensorsFile))
                    names.update(dict.fromkeys(opened.in_range(*_range(place))))
        tensors = f" of {', '.join(list(names)[:3])}" if names else ""
        tensors += f" and {len(names) - 3} more" if len(names) > 3 else ""
        size = f"{sum(place.length for _, place in lost):,} bytes{tensors}"
        remedy = "start these hosts again, or copy their part files into its folder on any host"
        return f"the part files of {listed} are missing, with {size}: {remedy}"

    # --- the places of files ----------------------------------------------------------------------

    def _all_places(self) -> dict[str, list[RunPlace]]:
        """Return where each file's bytes are, in order; of equal runs, the nearest."""
        places: dict[str, list[RunPlace]] = {file: [] for file in self.manifest.whole}
        for name, part in self.parts.items():
            is_elsewhere, at = name in self._elsewhere, 0
            near = _HERE if name in self.here else _ELSEWHERE if is_elsewhere else _LOST
            for file, runs in part.runs.items():
                for begin, length in runs:
                    places[file].append(RunPlace(begin, near, name, at, length))
                    at += length
        return {file: self._chain(file, sorted(of_file)) for file, of_file in places.items()}

    def _chain(self, file: str, places: Sequence[RunPlace]) -> list[RunPlace]:
        """Return places that contain each byte of a file once, in order."""
        chain: list[RunPlace] = []
        end = 0
        for place in places:
            if chain and _range(place) == _range(chain[-1]):
                continue
            if place.begin != end:
                break
            chain.append(place)
            end += place.length
        if end != self.manifest.whole[file]:
            where = os.path.join(self.path, NAME)
            raise CheckpointError(
                f"'{where}' is not a valid manifest: parts do not have byte {end} of '{file}' once"
            )
        return chain


def _range(place: RunPlace) -> tuple[int, int]:
    return place.begin, place.begin + place.length


class _Pieces:
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
        self._spread, self._part = spread, spread.parts[name]

    def in_range(self, begin: int, end: int) -> list[str]:
        """Return the tensors in these bytes, as SafetensorsFile.in_range() does for the file."""
        names: dict[str, None] = {}
        with contextlib.suppress(CheckpointError, OSError):
            for file, first, last in self._part.files_in(begin, end):
                if file.endswith(".safetensors"):
                    opened = self._spread.open(file, SafetensorsFile)
                    names.update(dict.fromkeys(opened.in_range(first, last)))
        return list(names)


def part_files_in(folder: str, parts: Mapping[str, PartRecord]) -> dict[str, str]:
    """Return the paths of those part files that a folder has, with the size of their runs."""
    paths = {}
    for name, part in parts.items():
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            if os.lstat(path).st_size == part.size:
                paths[name] = path
    return paths
