"""The files of a checkpoint whose hosts share no disk: each lies in pieces in part files.

Each rank has written what it holds into a part file of its own, one run of bytes after the other;
the manifest's entry `parts` says which run is where. A Spread puts the files together again:
readers of safetensors files see whole files, whose bytes come from the part files of this host.
Several ranks may have written the same bytes, as replicas on other hosts do.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from zshard import api
from zshard.api import (
    BLOCK,
    NAME,
    CheckpointError,
    FileBlocks,
    Manifest,
    OpenFile,
    SafetensorsFile,
    on_all_ranks,
)

_File = TypeVar("_File", bound=OpenFile)

ByteRange = tuple[str, int, int]
"""Bytes of a file: its name, the first, the one after the last."""


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
        """Return its entry in a manifest. Runs are text, which is shorter than JSON:
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
    """The place of a run of bytes of a file."""

    begin: int  # in the file
    length: int
    part: str  # a part file
    at: int  # the offset of the run in the part file


class Spread:
    """A checkpoint in parts, as this host has it. close() closes its part files."""

    def __init__(
        self,
        path: str,
        manifest: Manifest,
        folders: Iterable[str],
        elsewhere: Iterable[str] | None = None,
    ) -> None:
        """path: names the checkpoint in messages. folders: where the part files are. elsewhere: the
        names of others, which check() counts, and nothing reads; not None: to be collected."""
        self.path, self.manifest = path, manifest
        self.parts = parts_of(manifest, path)
        self._is_collected = elsewhere is not None
        self.here = dict.fromkeys(elsewhere or (), "")  # paths of part files
        for folder in folders:
            self.here |= part_files_in(folder, self.parts)
        self._opened: dict[str, PartFile] = {}
        self._places = places_in(self.here, self.parts)

    def open(self, name: str, kind: type[_File]) -> _File:
        """Open a file of the checkpoint as a `kind` of OpenFile."""
        size = self.manifest.whole[name]
        return kind(os.path.join(self.path, name), source=_Pieces(self, name, size))

    def part(self, name: str) -> PartFile:
        """Return an open part file."""
        if name not in self._opened:
            self._opened[name] = PartFile(self, name)
        return self._opened[name]

    def close(self) -> None:
        for file in self._opened.values():
            file.close()
        self._opened.clear()

    def places(self, file: str, begin: int, end: int) -> Iterator[RunPlace]:
        """Yield where bytes `begin` to `end` of a file are, in order, as far as they are here."""
        chain = self._places.get(file, [])
        first = bisect.bisect_right(chain, begin, key=lambda place: place.begin) - 1
        for place in itertools.islice(chain, max(first, 0), None):
            start, stop = max(begin, place.begin), min(end, place.begin + place.length)
            if place.begin >= end:
                return
            if start < stop:
                yield RunPlace(start, stop - start, place.part, place.at + start - place.begin)

    def blocks(self) -> FileBlocks:
        """Return all blocks of the part files here."""
        blocks, records = FileBlocks(), self.manifest.files
        for name in sorted(self.here):
            blocks.add(self.part(name), records[name], range(len(records[name].checksums)))
        return blocks

    def own_blocks(self, comm: api.Comm, wanted: Iterable[ByteRange]) -> FileBlocks:
        """Return the blocks of part files that have the bytes that this rank will read. Collective.
        Raise CheckpointError if the hosts of some ranks lack theirs."""
        ranges = list(wanted)
        with on_all_ranks(comm):
            self.check(ranges)
        numbers: dict[str, set[int]] = {}
        for place in (place for each in ranges for place in self.places(*each)):
            last = -(-(place.at + place.length) // BLOCK)
            numbers.setdefault(place.part, set()).update(range(place.at // BLOCK, last))
        blocks = FileBlocks()
        for name, of_part in sorted(numbers.items()):
            blocks.add(self.part(name), self.manifest.files[name], sorted(of_part))
        return blocks

    # --- what is missing --------------------------------------------------------------------------

    def gaps(self, wanted: Iterable[ByteRange]) -> list[ByteRange]:
        """Return which of these bytes are not here."""
        found = []
        for file, begin, end in wanted:
            for place in self.places(file, begin, end):
                if begin < place.begin:
                    found.append((file, begin, place.begin))
                begin = place.begin + place.length
            if begin < end:
                found.append((file, begin, end))
        return found

    def check(self, wanted: Iterable[ByteRange] | None = None) -> None:
        """Raise CheckpointError unless these bytes are here, or all."""
        everything = ((name, 0, size) for name, size in self.manifest.whole.items())
        gaps = self.gaps(everything if wanted is None else wanted)
        names: dict[str, None] = {}
        for file in dict.fromkeys(file for file, _, _ in gaps if file.endswith(".safetensors")):
            with contextlib.suppress(CheckpointError, OSError):
                opened = self.open(file, SafetensorsFile)
                for _, begin, end in (gap for gap in gaps if gap[0] == file):
                    names.update(dict.fromkeys(opened.in_range(begin, end)))
        if gaps:
            raise self.lack_of(gaps, list(names))

    def lack_of(self, gaps: Sequence[ByteRange], names: Sequence[str] = ()) -> CheckpointError:
        """Return an error that names the hosts that wrote these bytes, and what to do.

        names: of the tensors that they contain.
        """
        away = places_in(self.parts.keys() - self.here.keys(), self.parts)
        hosts: dict[str, set[int]] = {}
        for file, begin, end in gaps:
            for place in away.get(file, []):
                if place.begin < end and begin < place.begin + place.length:
                    part = self.parts[place.part]
                    hosts.setdefault(part.host, set()).add(part.rank)
        listed = "; ".join(
            f"host '{host}' (ranks {', '.join(map(str, sorted(ranks)))})"
            for host, ranks in sorted(hosts.items())
        )
        tensors = f" of {', '.join(names[:3])}" if names else ""
        tensors += f" and {len(names) - 3} more" if len(names) > 3 else ""
        size = f"{sum(end - begin for _, begin, end in gaps):,} bytes{tensors}"
        if not hosts:
            return CheckpointError(f"'{self.path}' is incomplete: no host has {size}")
        lack = f"this host lacks the part files of {listed}, with {size}"
        remedy = f"bring them to all hosts with `torchrun ... -m zshard ckpt collect {self.path}`"
        if self._is_collected:
            remedy = "no folder that was given has them"
        return CheckpointError(f"'{self.path}' is incomplete: {lack}: {remedy}")


def is_complete(folder: str) -> bool:
    """Return whether a folder has a checkpoint with all of its bytes."""
    if not os.path.lexists(os.path.join(folder, api.NAME)):
        return False
    manifest = Manifest.read(folder)
    if not manifest.whole:  # an ordinary one
        return True
    with contextlib.closing(Spread(folder, manifest, [folder])) as spread:
        return not spread.gaps((name, 0, size) for name, size in manifest.whole.items())


def places_in(names: Iterable[str], parts: Mapping[str, PartRecord]) -> dict[str, list[RunPlace]]:
    """Return where these part files have the bytes of each file, in order, each byte once."""
    found: dict[str, list[RunPlace]] = {}
    for name in names:
        at = 0
        for file, runs in parts[name].runs.items():
            for begin, length in runs:
                found.setdefault(file, []).append(RunPlace(begin, length, name, at))
                at += length
    chains: dict[str, list[RunPlace]] = {}
    for file, places in found.items():
        end, chain = 0, chains.setdefault(file, [])
        for begin, length, name, at in sorted(places):
            skip = max(end - begin, 0)
            if skip < length:
                chain.append(RunPlace(begin + skip, length - skip, name, at + skip))
                end = begin + length
    return chains


class _Pieces:
    def __init__(self, spread: Spread, name: str, size: int) -> None:
        self._spread, self._name, self.size = spread, name, size

    def read(self, ranges: list[tuple[int, memoryview]], /) -> None:
        for offset, memory in ranges:
            if offset + len(memory) > self.size:
                raise ValueError(f"'{self._name}' ends at byte {self.size}")
            wanted = (self._name, offset, offset + len(memory))
            if gaps := self._spread.gaps([wanted]):
                raise self._spread.lack_of(gaps)
            for begin, length, part, at in self._spread.places(*wanted):
                first = begin - offset
                self._spread.part(part).read_into(memory[first : first + length], at)

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
