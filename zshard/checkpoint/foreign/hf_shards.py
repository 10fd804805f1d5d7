"""Folders that torch's HuggingFaceStorageWriter wrote with save_distributed=True and did not
consolidate: safetensors files with each rank's parts of the tensors.

The header of each file gives the offsets of its parts in the full tensors, so parts
are chunks, as in torch.distributed.checkpoint's own folders. Nothing tells how many parts there
should be: gaps and overlaps are errors, and a tensor whose last part is missing has another shape.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import Any

from zshard._errors import CheckpointError
from zshard.checkpoint.checkpoint import Checkpoint
from zshard.checkpoint.foreign.dcp import Box, Chunked, covered
from zshard.checkpoint.foreign.torch_file import Stored
from zshard.checkpoint.manifest import object_of
from zshard.checkpoint.safetensors import HEADER_LIMIT, SafetensorsFile, TensorEntry, are_counts

_NAME = re.compile(r"shard-[0-9]+-model-[0-9]+-of-[0-9]+\.safetensors")
_NOTE = "DCP_SHARDING_INFO"


def shards_in(path: str) -> list[str]:
    """Return the names of such files in a folder."""
    return sorted(name for name in os.listdir(path) if _NAME.fullmatch(name))


def open_into(found: Checkpoint) -> None:
    """Open the folder at `found.path`. Raise CheckpointError if parts overlap or leave gaps."""
    parts: dict[str, list[tuple[tuple[int, ...], TensorEntry]]] = {}
    for name in shards_in(found.path):
        found.files[name] = file = SafetensorsFile(os.path.join(found.path, name))
        for tensor, begin in _begins(file).items():
            parts.setdefault(tensor, []).append((begin, file.entries[tensor]))
    found.model = {name: _whole(found.path, name, own) for name, own in parts.items()}


class _Parts(Chunked):
    """A tensor whose chunks are tensors of safetensors files."""

    def check(self) -> None:
        """Do nothing: the headers have been checked."""

    def _payload(self, i: int) -> tuple[int, None]:
        return self._chunks[i].stored.offset, None


def _begins(file: SafetensorsFile) -> dict[str, tuple[int, ...]]:
    """The first index of each part in the file, by tensor name."""
    where = f"the header of '{file.path}'"
    note = file.notes.get(_NOTE, "{}").encode(errors="surrogatepass")
    told = object_of(note, where, HEADER_LIMIT)
    begins = {}
    for name, entry in file.entries.items():
        facts = told.get(name)
        begin: Any = facts.get("saved_offsets") if isinstance(facts, dict) else None
        if not are_counts(begin) or len(begin) != len(entry.shape):
            raise CheckpointError(f"{where} has no valid saved_offsets for '{name}'")
        begins[name] = tuple(begin)
    return begins


def _whole(folder: str, name: str, parts: Sequence[tuple[tuple[int, ...], TensorEntry]]) -> Chunked:
    """The tensor that consists of these parts, given with their first indices."""
    dims, dtypes = {len(begin) for begin, _ in parts}, {entry.dtype for _, entry in parts}
    if len(dims) > 1 or len(dtypes) > 1:
        raise CheckpointError(
            f"the files in '{folder}' disagree on the dtype or number of dimensions of '{name}'"
        )
    ends = [[b + n for b, n in zip(begin, e.shape, strict=True)] for begin, e in parts]
    shape = tuple(max(each) for each in zip(*ends, strict=True))
    chunks = [Box(begin, e.shape, Stored(e.file, e.begin, 0)) for begin, e in parts]
    if covered(chunks) != math.prod(shape):
        raise CheckpointError(
            f"the parts of '{name}' in '{folder}' overlap or leave a gap: a file is missing or "
            "belongs to another save"
        )
    return _Parts(name, dtypes.pop(), shape, chunks)
