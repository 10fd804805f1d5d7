"""The file and the offset of each tensor, and the bytes that this rank writes.

The layout follows from names, shapes and dtypes, on which the ranks have agreed, so
each rank computes the layout of all files, and no rank needs to be told where to write.

Files are split as Hugging Face's tools split them: tensors in order, and a new file when the next
tensor would exceed the limit. Within a file, larger dtypes come first, so that the offset of each
tensor is a multiple of its item size; spaces pad the header to a multiple of ALIGN.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zshard import _core
from zshard.checkpoint.contents import Item
from zshard.checkpoint.manifest import BLOCK, FileRecord
from zshard.checkpoint.safetensors import CODES, HEADER_LIMIT

ALIGN = 4096  # bytes

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}
_UNITS |= {f"{p}iB".upper(): 1024 ** (i + 1) for i, p in enumerate("KMGT")}


class PlannedFile(NamedTuple):
    """A safetensors file to write."""

    name: str
    header: bytes  # with its length, padded
    size: int
    places: list[tuple[Item, int]]  # tensors and their first bytes in the file


class Piece(NamedTuple):
    """A run of bytes that this rank writes: some elements of a tensor, cast to a dtype."""

    file: int  # its number
    offset: int  # of the first byte
    values: Tensor
    begin: int  # row-major elements of `values`, from ... to
    end: int
    dtype: torch.dtype
    name: str  # of the tensor

    @property
    def size(self) -> int:
        """Its bytes in the file."""
        return (self.end - self.begin) * self.dtype.itemsize


def bytes_in(text: int | str) -> int:
    """Return a size in bytes, given as a number or as "5GB" or "200 MiB". Raise ValueError or
    TypeError for anything else."""
    if isinstance(text, int) and not isinstance(text, bool):
        number, unit = str(text), ""
    elif isinstance(text, str):
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
        number, unit = found.groups() if found else ("", "")
    else:
        raise TypeError(
            f"max_shard_size must be a number of bytes or a string such as '5GB', got {text!r}"
        )
    size = int(float(number) * _UNITS.get(unit.upper(), 0)) if number else 0
    if size < 1:
        raise ValueError(
            f"max_shard_size={text!r} is not a size: pass bytes, or text such as '5GB', '200MiB'"
        )
    return size


def lay_out(
    items: Sequence[Item], stem: str, limit: int, tied: Mapping[str, str] | None = None
) -> list[PlannedFile]:
    """Return the files for `items`, each with at most `limit` bytes of tensors, or one tensor.

    stem: files are named `<stem>.safetensors`, or `<stem>-00001-of-00002.safetensors` and so on.
    tied: aliases of tensors, which the header of the tensor's file lists as metadata.
    """
    groups: list[list[Item]] = [[]]
    filled = 0
    for item in items:
        size = _size_of(item)
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += size
    names = [f"{stem}.safetensors"]
    if len(groups) > 1:
        count = len(groups)
        names = [f"{stem}-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    return [_file(name, own, tied or {}) for name, own in zip(names, groups, strict=True)]


def index_of(files: Sequence[PlannedFile]) -> bytes:
    """Return the text of `<stem>.safetensors.index.json`."""
    homes = {item.name: file.name for file in files for item, _ in file.places}
    total = sum(_size_of(item) for file in files for item, _ in file.places)
    whole = {"metadata": {"total_size": total}, "weight_map": dict(sorted(homes.items()))}
    return json.dumps(whole, indent=2).encode()


def pieces_of(files: Sequence[PlannedFile]) -> list[Piece]:
    """Return what this rank writes, in order. Ranks that hold the same bytes write an equal share
    of them each."""
    places = [(number, *place) for number, file in enumerate(files) for place in file.places]
    totals: Counter[int] = Counter()  # bytes, by group
    for _, item, _ in places:
        if item.held is not None:
            totals[item.held.group] += item.held.values.numel() * item.dtype.itemsize
    done: Counter[int] = Counter()
    pieces = []
    for number, item, offset in places:
        if item.held is None:
            continue
        values, first, copies, copy, group = item.held
        size = item.dtype.itemsize
        # Both neighbors round alike, so there is no gap between what they write.
        cuts = (totals[group] * i // copies - done[group] for i in (copy, copy + 1))
        begin, end = (min(max(0, cut // size), values.numel()) for cut in cuts)
        if begin < end:
            start = offset + (first + begin) * size
            pieces.append(Piece(number, start, values, begin, end, item.dtype, item.name))
        done[group] += values.numel() * size
    return pieces


def record_of(file: str, size: int, written: Iterable[tuple[int, int, int]]) -> FileRecord:
    """Return the checksums of a file, from (offset, length, CRC-32C) of each write of all ranks.
    Raise RuntimeError unless they wrote each byte exactly once."""
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
        raise RuntimeError(
            f"'{file}' ({size} bytes) was not written exactly once at byte {end}: please report it"
        )
    return FileRecord(size, tuple(sums))


def joined(written: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Merge the checksums of adjacent bytes of one block."""
    made: list[tuple[int, int, int]] = []
    for offset, length, crc in sorted(written):
        if made and offset % BLOCK != 0 and sum(made[-1][:2]) == offset:
            first, before, other = made.pop()
            made.append((first, before + length, _core.crc32c_join(other, crc, length)))
        else:
            made.append((offset, length, crc))
    return made


def _file(name: str, items: list[Item], tied: Mapping[str, str]) -> PlannedFile:
    ordered = sorted(items, key=lambda item: -item.dtype.itemsize)  # a stable sort
    inside = {item.name for item in ordered}
    notes = {other: home for other, home in tied.items() if home in inside}
    header: dict[str, object] = {"__metadata__": {**notes, "format": "pt"}}
    at = 0
    starts = []
    for item in ordered:
        size = _size_of(item)
        shape, offsets = list(item.shape), [at, at + size]
        header[item.name] = {"dtype": CODES[item.dtype], "shape": shape, "data_offsets": offsets}
        starts.append(at)
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > HEADER_LIMIT - ALIGN:
        raise ValueError(
            f"the header of '{name}' would have {len(text)} bytes, which is too large: pass a "
            "smaller max_shard_size, for more files with fewer tensors each"
        )
    text += b" " * (-(len(text) + 8) % ALIGN)
    begin = 8 + len(text)
    places = [(item, begin + start) for item, start in zip(ordered, starts, strict=True)]
    return PlannedFile(name, len(text).to_bytes(8, "little") + text, begin + at, places)


def _size_of(item: Item) -> int:
    return math.prod(item.shape) * item.dtype.itemsize
