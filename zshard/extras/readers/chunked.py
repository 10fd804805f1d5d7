"""Tensors in chunks, and the folders of safetensors files that consist of them.

HuggingFaceStorageWriter of torch.distributed.checkpoint with save_distributed=True, if it does not
consolidate, writes safetensors files with each rank's parts of the tensors. Their headers give the
offsets of the parts in the full tensors. No header lists how many parts there should be: gaps and
overlaps are errors, and a tensor without its last part has another shape.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import TypeGuard

import torch

from zshard.api import (
    Checkpoint,
    CheckpointError,
    Readable,
    SafetensorsFile,
    bytes_of,
)

Index = tuple[int, ...]


class Chunked:
    """A tensor in chunks: boxes, given with the index of their first element."""

    def __init__(
        self,
        what: str,
        shape: Index,
        dtype: torch.dtype,
        chunks: Sequence[tuple[Index, Readable]],
    ) -> None:
        """what: names it in the CheckpointError if the chunks do not cover each element once."""
        self.dtype, self.shape, self._chunks = dtype, shape, chunks
        if not _cover(shape, [(begin, chunk.shape) for begin, chunk in chunks]):
            raise CheckpointError(
                f"the chunks of {what} overlap, leave a gap or exceed its shape {shape}: a file is "
                "missing or belongs to another save; copy all files of the checkpoint"
            )

    @property
    def files(self) -> list[str]:
        """The names of the files that contain it."""
        return sorted({name for _, chunk in self._chunks for name in chunk.files})

    def check(self) -> None:
        """Check what is around the values of all chunks."""
        for _, chunk in self._chunks:
            chunk.check()

    def value(self) -> torch.Tensor:
        """Read the full tensor."""
        full = torch.empty(self.shape, dtype=self.dtype)
        if full.numel() > 0:
            self.read_into(bytes_of(full), 0)
        return full

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the tensor's bytes, in row-major order, from byte `offset` on."""
        item = self.dtype.itemsize
        for index, chunk in self._chunks:
            for start, inner, length in _runs(self.shape, index, chunk.shape):
                low = max(start * item, offset)
                high = min((start + length) * item, offset + len(memory))
                if low < high:
                    place = memory[low - offset : high - offset]
                    chunk.read_into(place, low + (inner - start) * item)


def _runs(shape: Index, offsets: Index, sizes: Index) -> Iterator[tuple[int, int, int]]:
    """Yield runs of elements that are contiguous in a box and in the tensor of that shape around
    it: (first element in the tensor, first element in the box, number of elements)."""
    inner = len(shape)  # the box covers all dimensions from here on in full
    while inner > 0 and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)  # the box covers part of this one, in one piece
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    length = math.prod(sizes[outer:])
    base = sum(o * s for o, s in zip(offsets, strides, strict=True))
    for number, index in enumerate(itertools.product(*map(range, sizes[:outer]))):
        start = base + sum(i * s for i, s in zip(index, strides[:outer], strict=True))
        yield start, number * length, length


def _cover(shape: Index, boxes: Sequence[tuple[Index, Index]]) -> bool:
    """Return whether the boxes, (first index, sizes), cover each element once."""
    ordered = sorted(box for box in boxes if math.prod(box[1]))
    for i, (at, size) in enumerate(ordered):
        for other, other_size in ordered[i + 1 :]:
            if shape and other[0] >= at[0] + size[0]:
                break  # as are all later ones
            spans = zip(at, size, other, other_size, strict=True)
            if all(a < d + e and d < a + b for a, b, d, e in spans):
                return False
    inside = all(
        b + n <= whole for at, size in boxes for b, n, whole in zip(at, size, shape, strict=True)
    )
    return inside and sum(math.prod(size) for _, size in ordered) == math.prod(shape)


_SHARD = re.compile(r"shard-[0-9]+-model-[0-9]+-of-[0-9]+\.safetensors")


def shards_in(path: str) -> list[str]:
    """Return the names of such files in a folder."""
    return sorted(name for name in os.listdir(path) if _SHARD.fullmatch(name))


def _is_index(begin: object) -> TypeGuard[list[int]]:
    return isinstance(begin, list) and all(type(each) is int and each >= 0 for each in begin)


def open_shards_into(found: Checkpoint, names: Sequence[str]) -> None:
    """Open these files of a folder. Raise CheckpointError if parts overlap or leave gaps."""
    parts: dict[str, list[tuple[Index, Readable]]] = {}
    for file_name in names:
        found.files[file_name] = file = SafetensorsFile(os.path.join(found.path, file_name))
        where = f"the header of '{file.path}'"
        told = file.note("DCP_SHARDING_INFO")
        for name, entry in file.entries.items():
            facts = told.get(name)
            begin = facts.get("saved_offsets") if isinstance(facts, dict) else None
            if not _is_index(begin) or len(begin) != len(entry.shape):
                raise CheckpointError(f"{where} has no valid saved_offsets for '{name}'")
            parts.setdefault(name, []).append((tuple(begin), entry))
    model = {}
    for name, own in parts.items():
        if len({(len(begin), entry.dtype) for begin, entry in own}) > 1:
            raise CheckpointError(
                f"the files in '{found.path}' disagree on the dtype or number of dimensions of "
                f"'{name}'"
            )
        ends = [[b + n for b, n in zip(begin, e.shape, strict=True)] for begin, e in own]
        shape = tuple(max(each) for each in zip(*ends, strict=True))
        model[name] = Chunked(f"'{name}' in '{found.path}'", shape, own[0][1].dtype, own)
    found.model = model
