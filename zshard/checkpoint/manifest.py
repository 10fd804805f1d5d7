"""zshard.json: the files of a checkpoint, their sizes and their checksums; and verifying them.

It is written after all other files are synced, and before the folder is renamed into place. So a
folder with a valid manifest is finished, and a file that does not match it has been damaged since.
CRC-32C checksums of 4 MiB blocks cover every byte of every file, and one checksum covers the
manifest itself.

Hosts that share no disk have a manifest of version 2 each, all the same: `files` lists part files,
`whole` the sizes of the checkpoint's files, and an extra's entry `parts` which bytes of them are
where (extras/per_host/parts.py).

    {"crc32c": "89abcdef", "checkpoint": {"format": "zshard", "version": 1, "id": ..., ...}}

The checksum covers the object under "checkpoint", as json.dumps() writes it with sorted keys and
without spaces: reformatting the text does no damage.

Each block has its own checksum, so the ranks can divide the blocks, and an error can name the file,
the bytes and the tensors. If only one host will read a block, that host verifies it: the block is
then in its page cache when it is read, and crosses the disk or network only once.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

from zshard import _core
from zshard._errors import CheckpointError
from zshard.checkpoint.progress import advance
from zshard.checkpoint.safetensors import OpenFile, SafetensorsFile, object_of, rows_of
from zshard.ranks.agreement import gather_bytes
from zshard.state.source import CHUNK

NAME = "zshard.json"
BLOCK = 2**22  # bytes per checksum
VERSION = 1
VERSION_OF_PARTS = 2
LIMIT = 2**30  # bytes of a manifest

_HEX = re.compile(r"[0-9a-f]{32}")
_RUN = 16  # blocks per call

Written = tuple[int, int, int]
"""Bytes that were written to a file: offset, length, CRC-32C."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint."""

    size: int  # bytes
    checksums: tuple[int, ...]  # CRC-32C of each BLOCK; the last block may be shorter

    @staticmethod
    def of(file: str, size: int, written: Iterable[Written]) -> FileRecord:
        """Return the checksums of a file from all ranks' writes. Raise RuntimeError unless they
        wrote each byte exactly once."""
        sums: list[int] = []
        end = 0
        for offset, length, crc in sorted(written):
            if offset != end or offset // BLOCK != (offset + length - 1) // BLOCK:
                break
            if offset % BLOCK == 0:
                sums.append(crc)
            else:
                sums[-1] = _core.crc32c_join(sums[-1], crc, length)
            end += length
        if end != size:
            raise RuntimeError(f"byte {end} of '{file}' was not written exactly once: report it")
        return FileRecord(size, tuple(sums))

    @staticmethod
    def copy(path: str, size: int, read: Callable[[memoryview, int], None]) -> FileRecord:
        """Create a file, a chunk at a time, and sync it; return its record.

        read: fills memory with the bytes from an offset on.
        """
        rows: list[Written] = []
        chunk = bytearray(min(CHUNK, size))
        with _core.File.create(path, size) as file:
            for offset in range(0, size, CHUNK):
                data = memoryview(chunk)[: min(CHUNK, size - offset)]
                read(data, offset)
                rows += rows_of(file.write([(offset, data)], BLOCK))
            file.sync()
        return FileRecord.of(path, size, rows)


@dataclass(frozen=True)
class Manifest:
    """The content of zshard.json."""

    id: str  # 32 hexadecimal digits, unique to a save
    step: int | None
    world: int  # ranks that wrote it
    files: Mapping[str, FileRecord]  # all files on disk but the manifest
    tied: Mapping[str, str] = field(default_factory=dict)  # alias: name in a file
    model: Mapping[str, Any] = field(default_factory=dict)  # {"extra_state": {name: encoded value}}
    optimizer: Mapping[str, Any] | None = None  # {"class", "groups", "state"}: see contents.py
    extra: Sequence[Any] = ()  # encoded, by rank; only one if all are equal
    software: Mapping[str, str] = field(default_factory=dict)  # names and versions
    finite: bool = True  # whether no parameter is NaN or infinite
    whole: Mapping[str, int] = field(default_factory=dict)  # with parts: bytes of each file
    more: Mapping[str, Any] = field(default_factory=dict)  # entries of extras, by name

    @property
    def names(self) -> Collection[str]:
        """The names of the checkpoint's files, on disk or in parts."""
        return self.whole or self.files

    def extra_of(self, rank: int) -> Any:
        """Return what `rank` saved, or rank 0 if there was no such rank; encoded."""
        if not self.extra:
            return {}
        return self.extra[rank if rank < len(self.extra) else 0]

    def dump(self) -> bytes:
        """Return the text of zshard.json."""
        files = {
            name: {"size": record.size, "crc32c": "".join(f"{crc:08x}" for crc in record.checksums)}
            for name, record in self.files.items()
        }
        body = {each.name: getattr(self, each.name) for each in fields(self)}
        body |= {"format": "zshard", "version": VERSION, "block": BLOCK, "files": files}
        if self.whole:
            body["version"] = VERSION_OF_PARTS
        else:
            del body["whole"]
        body |= {"extra": list(self.extra), **body.pop("more")}
        signed = {"crc32c": _checksum(body), "checkpoint": body}
        return json.dumps(signed, indent=1, allow_nan=False).encode()

    @staticmethod
    def parse(text: bytes, path: str) -> Manifest:
        """Return the Manifest that dump() made into `text`; messages refer to `path`. Raise
        CheckpointError for any other text."""
        signed = object_of(text, f"'{path}'", LIMIT)
        body = signed.get("checkpoint")
        if not isinstance(body, dict) or body.get("format") != "zshard":
            raise CheckpointError(f"'{path}' is not the manifest of a zshard checkpoint")
        if body.get("version") not in (VERSION, VERSION_OF_PARTS):
            version = f"format version {str(body.get('version'))[:20]}"
            reads = f"this zshard reads versions {VERSION} and {VERSION_OF_PARTS}: upgrade zshard"
            raise CheckpointError(f"'{path}' has {version}, but {reads}")
        if signed.get("crc32c") != _checksum(body):
            raise CheckpointError(
                f"'{path}' is damaged: its checksum does not match its content; load an earlier one"
            )
        try:
            return _manifest_of(body)
        except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"'{path}' is not a valid manifest: {error!r}") from None

    @staticmethod
    def read(path: str) -> Manifest:
        """Read the manifest of the checkpoint at `path`."""
        where = os.path.join(path, NAME)
        with OpenFile(where, follow=False) as file:
            return Manifest.parse(bytes(file.bytes_of(min(file.size, LIMIT + 1))), where)


_FIELDS = {*(each.name for each in fields(Manifest)), "format", "version", "block"}  # no extra's


def _checksum(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"{_core.crc32c(text.encode()):08x}"


def _manifest_of(body: Mapping[str, Any]) -> Manifest:
    step = body["step"]
    model = dict_of(body["model"])
    for part in ("extra_state", "versions"):
        dict_of(model.get(part, {}))
    manifest = Manifest(
        id=body["id"],
        step=None if step is None else _count(step),
        world=_count(body["world"]),
        files={_plain(name): _record_of(name, facts) for name, facts in body["files"].items()},
        tied=_strings(body["tied"]),
        model=model,
        optimizer=None if body["optimizer"] is None else dict_of(body["optimizer"]),
        extra=tuple(body["extra"]),
        software=_strings(body["software"]),
        finite=body["finite"],
        whole={_plain(name): _count(size) for name, size in body.get("whole", {}).items()},
        more={
            name: facts for name, facts in body.items() if name not in _FIELDS and facts is not None
        },
    )
    in_parts = body["version"] == VERSION_OF_PARTS
    for is_valid, name in (
        (body["block"] == BLOCK, "block"),
        (type(manifest.finite) is bool, "finite"),
        (_HEX.fullmatch(manifest.id) is not None, "id"),
        (len(manifest.extra) in (0, 1, manifest.world), "extra"),
        (bool(manifest.more.get("parts")) == bool(manifest.whole) == in_parts, "parts"),
    ):
        if not is_valid:
            raise ValueError(f"invalid {name}: {body.get(name)!r:.40}")
    return manifest


def _record_of(name: str, facts: Mapping[str, Any]) -> FileRecord:
    size, text = _count(facts["size"]), facts["crc32c"]
    if len(text) != 8 * -(-size // BLOCK):
        raise ValueError(f"wrong number of checksums for '{name:.80}': {len(text) // 8}")
    return FileRecord(size, tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8)))


def _plain(name: str) -> str:
    """Return a file name, if it does not lead out of the folder."""
    if not name or name in (".", "..", NAME) or set(name) & set("/\\\0") or len(name) > 255:
        raise ValueError(f"{name!r:.80} is not the name of a file in the same folder")
    return name


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"expected a non-negative integer, got {value!r:.40}")
    return value


def dict_of(value: object) -> dict[str, Any]:
    """Return `value`, which must be a dict."""
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {value!r:.40}")
    return value


def _strings(value: object) -> dict[str, str]:
    if not all(isinstance(each, str) for each in dict_of(value).values()):
        raise TypeError("expected an object of strings")
    return dict_of(value)


# --- verifying ------------------------------------------------------------------------------------


class Block(NamedTuple):
    """A block of a file."""

    file: OpenFile
    record: FileRecord
    number: int


class FileBlocks(list[Block]):
    """Blocks of files, to be verified."""

    @staticmethod
    def heads(files: Mapping[str, OpenFile], records: Mapping[str, FileRecord]) -> FileBlocks:
        """Return the blocks that opening the files reads: headers, and complete files that are not
        safetensors files. files, records: by file name."""
        return FileBlocks._of(files, records, lambda heads, _: range(heads))

    @staticmethod
    def data(files: Mapping[str, OpenFile], records: Mapping[str, FileRecord]) -> FileBlocks:
        """Return all other blocks."""
        return FileBlocks._of(files, records, range)

    @staticmethod
    def _of(
        files: Mapping[str, OpenFile],
        records: Mapping[str, FileRecord],
        chosen: Callable[[int, int], range],
    ) -> FileBlocks:
        """chosen: returns the numbers of blocks, from those of head blocks and of all blocks."""
        blocks = FileBlocks()
        for name, file in files.items():
            record = records[name]
            size = file.data if isinstance(file, SafetensorsFile) else record.size
            blocks.add(file, record, chosen(-(-size // BLOCK), len(record.checksums)))
        return blocks

    def add(self, file: OpenFile, record: FileRecord, numbers: Iterable[int]) -> None:
        """Add blocks of a file, by their numbers."""
        self += [Block(file, record, number) for number in numbers]

    def share(self, rank: int, world: int) -> FileBlocks:
        """Return the share that `rank` verifies."""
        return FileBlocks(share(self, rank, world))

    def check(self) -> None:
        """Verify them. Raise CheckpointError for the first one with a wrong checksum."""
        for (file, record, first), end in _runs(self):
            last = min(end * BLOCK, record.size)
            for offset, length, crc in file.check(first * BLOCK, last, BLOCK):
                block = offset // BLOCK
                if crc != record.checksums[block]:
                    names = file.in_range(offset, offset + length)
                    names[3:] = [f"and {len(names) - 3} more"] if len(names) > 3 else []
                    where = f"bytes {offset} to {offset + length} (block {block})"
                    where += f", which contain {', '.join(names)}" if names else ""
                    text = f"'{file.path}' is damaged: checksum mismatch in {where}"
                    raise CheckpointError(text)
            advance(last - first * BLOCK)


def own_blocks(
    comm: _core.Comm,
    files: Mapping[str, OpenFile],
    records: Mapping[str, FileRecord],
    wanted: Iterable[tuple[OpenFile, int, int]],
    host: str,
) -> FileBlocks:
    """Return the data blocks that this rank verifies. Collective. The ranks of a host
    divide the blocks that only this host wants, in contiguous stretches, which suit disks; all
    ranks divide the rest.

    wanted: (file, first byte, byte after the last) of what this rank will read. It decides which
        rank verifies a block, not whether it is verified: the ranks verify each block once.
    host: the name of this rank's host.
    """
    blocks = FileBlocks.data(files, records)
    count = len(blocks)
    marks = bytearray(count)  # a byte for each block: 1 if this rank wants some of it
    number = {(id(file), block): i for i, (file, _, block) in enumerate(blocks)}
    for file, begin, end in wanted:
        for block in range(begin // BLOCK, -(-end // BLOCK)):
            if begin < end and (id(file), block) in number:
                marks[number[id(file), block]] = 1
    everyone = gather_bytes(comm, bytes(marks) + host.encode())
    near = [rank for rank, data in enumerate(everyone) if data[count:] == host.encode()]
    masks: dict[bytes, int] = {}  # a byte for each block that the host wants, by host
    for data in everyone:
        masks[data[count:]] = masks.get(data[count:], 0) | int.from_bytes(data[:count], "little")
    once = twice = 0
    for mask in masks.values():
        twice |= once & mask
        once |= mask
    alone = (once & ~twice).to_bytes(count, "little")
    ours = masks[host.encode()].to_bytes(count, "little")
    of_host = [i for i in range(count) if alone[i] and ours[i]]
    rest = [i for i in range(count) if not alone[i]]
    of_host = [*share(of_host, near.index(comm.rank), len(near))]
    return FileBlocks(blocks[i] for i in sorted([*of_host, *share(rest, comm.rank, comm.world)]))


def share(things: Sequence[_T], rank: int, world: int) -> Sequence[_T]:
    """Return the contiguous share of `things` that `rank` checks; all shares are about equal."""
    return things[len(things) * rank // world : len(things) * (rank + 1) // world]


def _runs(blocks: Sequence[Block]) -> Iterator[tuple[Block, int]]:
    """Yield the first one of adjacent blocks, and the number after the last one."""
    begin = 0
    for i, (file, _, number) in enumerate(blocks, 1):
        follows = i < len(blocks) and (blocks[i].file, blocks[i].number) == (file, number + 1)
        if not follows or i - begin == _RUN:
            yield blocks[begin], number + 1
            begin = i
