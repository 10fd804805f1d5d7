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
from typing import Any

import torch

from zshard.api import Checkpoint, CheckpointError, Readable, SafetensorsFile, bytes_of

Index = tuple[int, ...]


class Chunked:
    """A tensor in chunks: boxes, given with the index of their first element."""

    def __init__(
        self, what: str, shape: Index, dtype: torch.dtype, chunks: Sequence[tuple[Index, Readable]]
    ) -> None:
        """what: names it in the CheckpointError if the chunks do not cover each element once."""
        self.dtype, self.shape, self._chunks = dtype, shape, chunks
        if not _cover(shape, [(begin, chunk.shape) for begin, chunk in chunks]):
            text = f"the chunks of {what} overlap, leave a gap or exceed its shape {shape}"
            raise CheckpointError(f"{text}: copy all files of the checkpoint")

    @property
    def files(self) -> list[str]:
        return sorted({name for _, chunk in self._chunks for name in chunk.files})

    def check(self) -> None:
        for _, chunk in self._chunks:
            chunk.check()

    def value(self) -> torch.Tensor:
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


def open_shards_into(checkpoint: Checkpoint, names: Sequence[str]) -> None:
    """Open these files of a folder. Raise CheckpointError if parts overlap or leave gaps."""
    parts: dict[str, list[tuple[Index, Readable]]] = {}
    for file_name in names:
        file = SafetensorsFile(os.path.join(checkpoint.path, file_name))
        checkpoint.files[file_name] = file
        where = f"the header of '{file.path}'"
        info = file.note("DCP_SHARDING_INFO")
        for name, entry in file.entries.items():
            facts = info.get(name)
            begin: Any = facts.get("saved_offsets") if isinstance(facts, dict) else None
            is_list = isinstance(begin, list) and all(type(n) is int and n >= 0 for n in begin)
            if not is_list or len(begin) != len(entry.shape):
                raise CheckpointError(f"{where} has no valid saved_offsets for '{name}'")
            parts.setdefault(name, []).append((tuple(begin), entry))
    model = {}
    for name, chunks in parts.items():
        if len({(len(begin), entry.dtype) for begin, entry in chunks}) > 1:
            raise CheckpointError(f"'{name}' has several dtypes or ranks in '{checkpoint.path}'")
        ends = [[b + n for b, n in zip(begin, e.shape, strict=True)] for begin, e in chunks]
        shape = tuple(max(each) for each in zip(*ends, strict=True))
        model[name] = Chunked(f"'{name}' in '{checkpoint.path}'", shape, chunks[0][1].dtype, chunks)
    checkpoint.model = model
