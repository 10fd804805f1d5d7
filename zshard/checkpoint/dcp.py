"""Folders written by torch.distributed.checkpoint, including its Hugging Face writer.

Such a folder stores a tensor in chunks. In torch's own format, each chunk is a torch.save() file
within a larger file. `.metadata` lists the tensors, their chunks, and the keys that led to each
tensor in the nested dict that was saved; these keys distinguish the model from its optimizer. All
pickles are read as data (torch_file.py). Then any range of elements can be read straight into
place.

HuggingFaceStorageWriter with save_distributed=True, if it does not consolidate, writes safetensors
files with each rank's parts of the tensors. Their headers give the offsets of the parts in the full
tensors. No header lists how many parts there should be: gaps and overlaps are errors, and a tensor
without its last part has another shape.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from zshard._errors import CheckpointError
from zshard.checkpoint.checkpoint import (
    Checkpoint,
    KeyPath,
    Readable,
    is_extra_state,
    optimizer_of_paths,
    read_whole,
)
from zshard.checkpoint.manifest import LIMIT
from zshard.checkpoint.safetensors import (
    HEADER_LIMIT,
    OpenFile,
    SafetensorsFile,
    TensorEntry,
    are_counts,
    object_of,
)
from zshard.checkpoint.torch_file import (
    DTYPES,
    NotPlainError,
    Record,
    Stored,
    are_sizes,
    extent,
    parse,
    value_in,
    values_at,
)
from zshard.ranks.agreement import bytes_of

METADATA = ".metadata"

_MODELS = ("model", "model_state_dict", "state_dict", "module", "net")
_OPTIMIZERS = (
    *("optimizer", "optim", "optimizer_state_dict", "optim_state_dict", "opt"),
    "optimizer_0",
)
_PREFIX = "torch.distributed.checkpoint."
_NO_NAMES = (
    "it is keyed by unknown names; save the result of get_state_dict() of "
    "torch.distributed.checkpoint.state_dict, which uses names, or load the model alone"
)

_T = TypeVar("_T")
Tensors = Mapping[KeyPath, Readable]
Values = Mapping[KeyPath, Callable[[], object]]  # read when they are asked for


def open_into(found: Checkpoint, with_optimizer: bool) -> None:
    """Open the folder at `found.path`. Raise CheckpointError if it is damaged, or if its pickles
    cannot be read as plain data."""
    where = os.path.join(found.path, METADATA)
    with OpenFile(where) as file:
        text = bytes(file.bytes_of(min(file.size, LIMIT + 1)))
    read_metadata(found, text, where, with_optimizer)


def read_metadata(found: Checkpoint, text: bytes, where: str, with_optimizer: bool) -> None:
    """Fill `found` from the text of its metadata; messages refer to `where`."""
    try:
        metadata = parse(text)
    except ValueError as error:
        more = "; save it again with torch's own planner and writer"
        what = f"{error}{more if isinstance(error, NotPlainError) else ''}"
        raise CheckpointError(f"cannot read '{where}' as plain data: {what}") from None
    if not isinstance(metadata, Record) or metadata.name != f"{_PREFIX}metadata.Metadata":
        raise CheckpointError(f"'{where}' is not torch.distributed.checkpoint metadata")
    try:
        tensors, values = _contents(found, where, metadata)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"'{where}' is invalid torch.distributed.checkpoint metadata: {error!r:.150}"
        ) from None
    _sort_out(found, tensors, values, with_optimizer)


# --- splitting model and optimizer ----------------------------------------------------------------


def _sort_out(found: Checkpoint, tensors: Tensors, values: Values, with_optimizer: bool) -> None:
    """Assign entries under a key like "model" to the model and under a key like "optimizer" to the
    optimizer, at the top level or one below. Without the former, the top level is the model."""
    paths = [*tensors, *values]
    model, optimizer = _under(_MODELS, paths), _under(_OPTIMIZERS, paths)
    beside = [root for root in (model, optimizer) if root is not None]
    rest, extra = _outside(tensors, beside), _outside(values, beside)
    if model is None:
        of_model = {path: entry for path, entry in rest.items() if len(path) == 1} or rest
        rest = {path: entry for path, entry in rest.items() if path not in of_model}
        others = {path: read for path, read in extra.items() if is_extra_state(str(path[-1]))}
        extra = {path: read for path, read in extra.items() if path not in others}
    else:
        of_model, others = _within(tensors, model), _within(values, model)
    found.model = {_dotted(path): entry for path, entry in of_model.items()}
    found.others = {_dotted(path): read() for path, read in others.items()}
    extra |= {path: functools.partial(read_whole, entry) for path, entry in rest.items()}
    found.shared = {_dotted(path): read for path, read in extra.items()}
    if optimizer is not None and with_optimizer:
        told = {path: read() for path, read in _within(values, optimizer).items()}
        try:
            own = _within(tensors, optimizer)
            found.optimizer = optimizer_of_paths(own, told, list(found.model))
        except (KeyError, TypeError):
            found.no_optimizer = _NO_NAMES


def _within(things: Mapping[KeyPath, _T], root: KeyPath) -> dict[KeyPath, _T]:
    return {p[len(root) :]: each for p, each in things.items() if p[: len(root)] == root}


def _outside(things: Mapping[KeyPath, _T], roots: Sequence[KeyPath]) -> dict[KeyPath, _T]:
    return {p: each for p, each in things.items() if not any(p[: len(r)] == r for r in roots)}


def _under(names: Sequence[str], paths: Sequence[KeyPath]) -> KeyPath | None:
    """Return the shortest path of keys that ends with one of the names and has keys below it."""
    found = {
        path[: i + 1] for path in paths for i in range(min(2, len(path) - 1)) if path[i] in names
    }
    return min(found, key=lambda path: (len(path), names.index(path[-1])), default=None)


def _dotted(path: KeyPath) -> str:
    return ".".join(str(key) for key in path)


# --- the metadata ---------------------------------------------------------------------------------


def _contents(found: Checkpoint, where: str, metadata: Record) -> tuple[Tensors, Values]:
    """Return tensors and other values by their paths."""
    storage = _storage(found, where, metadata)
    paths = metadata.state.get("planner_data") or {}
    tensors: dict[KeyPath, Readable] = {}
    values: dict[KeyPath, Callable[[], object]] = {}
    for name, told in metadata.field("state_dict_metadata").items():
        path = paths.get(name, tuple(name.split(".")))
        if not isinstance(path, tuple) or not path:
            raise TypeError(f"invalid path {path!r:.200}")
        if told.name.endswith(".TensorStorageMetadata"):
            tensors[path] = _tensor(where, name, told, storage)
        else:
            values[path] = functools.partial(value_in, storage[name, None], name)
    return tensors, values


def _storage(found: Checkpoint, where: str, metadata: Record) -> dict[tuple[str, object], Stored]:
    """Return the location of each chunk, by name and the chunk's first index."""
    made = {}
    for index, info in metadata.field("storage_data").items():
        name, offset = index.field("fqn"), index.state.get("offset")
        if info.state.get("transform_descriptors"):
            raise CheckpointError(
                f"'{where}' stores '{name}' compressed, which is not supported: load it "
                "with torch.distributed.checkpoint and save it again without extensions"
            )
        file = _file(found, where, info.field("relative_path"))
        begin, length = info.field("offset"), info.field("length")
        if not are_sizes((begin, length)) or begin + length > file.size:
            raise CheckpointError(
                f"'{file.path}' is too short: it has {file.size} bytes, but '{name}' is at "
                f"bytes {begin} to {begin + length}"
            )
        made[name, offset] = Stored(file, begin, length)
    return made


def _file(found: Checkpoint, where: str, name: str) -> OpenFile:
    if name not in found.files:
        if not isinstance(name, str) or set(name) & set("/\\\0") or name in ("", ".", ".."):
            raise CheckpointError(
                f"'{where}' refers to {name!r:.80}, which is not a file in its folder"
            )
        path = os.path.join(found.path, name)
        if not os.path.lexists(path):
            raise CheckpointError(
                f"'{path}' is missing, but '{where}' refers to it; copy all files of the checkpoint"
            )
        found.files[name] = OpenFile(path)
    return found.files[name]


def _tensor(
    where: str, name: str, told: Record, storage: Mapping[tuple[str, object], Stored]
) -> Chunked:
    shape, dtype = told.field("size"), told.field("properties").state[0]
    if not are_sizes(shape) or getattr(dtype, "name", None) not in DTYPES:
        raise CheckpointError(
            f"'{where}' has an invalid shape or dtype for '{name}': {shape!r:.200}, {dtype!r}"
        )
    kind, chunks = DTYPES[dtype.name], []
    for each in told.field("chunks"):
        offsets, sizes = each.field("offsets"), each.field("sizes")
        if not (are_sizes(offsets) and are_sizes(sizes)) or any(
            begin + size > whole for begin, size, whole in zip(offsets, sizes, shape, strict=True)
        ):
            raise CheckpointError(f"'{where}' has a chunk of '{name}' outside its shape {shape}")
        stored = storage[name, offsets]
        locate = functools.partial(values_at, stored, name, kind, sizes)
        chunks.append(Chunk(offsets, sizes, stored.file, locate))
    if covered(chunks) != math.prod(shape):
        raise CheckpointError(f"'{where}' has chunks of '{name}' that overlap or leave a gap")
    return Chunked(kind, shape, chunks)


# --- files of the Hugging Face writer -------------------------------------------------------------

_SHARD = re.compile(r"shard-[0-9]+-model-[0-9]+-of-[0-9]+\.safetensors")


def shards_in(path: str) -> list[str]:
    """Return the names of such files in a folder."""
    return sorted(name for name in os.listdir(path) if _SHARD.fullmatch(name))


def open_shards_into(found: Checkpoint) -> None:
    """Open the folder at `found.path`. Raise CheckpointError if parts overlap or leave gaps."""
    parts: dict[str, list[tuple[tuple[int, ...], TensorEntry]]] = {}
    for name in shards_in(found.path):
        found.files[name] = file = SafetensorsFile(os.path.join(found.path, name))
        where = f"the header of '{file.path}'"
        note = file.notes.get("DCP_SHARDING_INFO", "{}").encode(errors="surrogatepass")
        told = object_of(note, where, HEADER_LIMIT)
        for tensor, entry in file.entries.items():
            facts = told.get(tensor)
            begin = facts.get("saved_offsets") if isinstance(facts, dict) else None
            if not are_counts(begin) or len(begin) != len(entry.shape):
                raise CheckpointError(f"{where} has no valid saved_offsets for '{tensor}'")
            parts.setdefault(tensor, []).append((tuple(begin), entry))
    found.model = {name: _joined(found.path, name, own) for name, own in parts.items()}


def _joined(
    folder: str, name: str, parts: Sequence[tuple[tuple[int, ...], TensorEntry]]
) -> Chunked:
    """Return the tensor that consists of these parts, given with their first indices."""
    dims, dtypes = {len(begin) for begin, _ in parts}, {entry.dtype for _, entry in parts}
    if len(dims) > 1 or len(dtypes) > 1:
        raise CheckpointError(
            f"the files in '{folder}' disagree on the dtype or number of dimensions of '{name}'"
        )
    ends = [[b + n for b, n in zip(begin, e.shape, strict=True)] for begin, e in parts]
    shape = tuple(max(each) for each in zip(*ends, strict=True))
    chunks = [
        Chunk(begin, e.shape, e.file, functools.partial(lambda at: (at, None), e.begin))
        for begin, e in parts
    ]
    if covered(chunks) != math.prod(shape):
        raise CheckpointError(
            f"the parts of '{name}' in '{folder}' overlap or leave a gap: a file is missing or "
            "belongs to another save"
        )
    return Chunked(dtypes.pop(), shape, chunks)


# --- tensors in chunks ----------------------------------------------------------------------------


class Chunk:
    """A box of a tensor: its first index, its shape, and the location of its values."""

    def __init__(
        self,
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        file: OpenFile,
        locate: Callable[[], tuple[int, tuple[int, ...] | None]],
    ) -> None:
        """locate: returns the offset of the first value in the file, and the strides as from
        values_at(); it checks the data around the values."""
        self.offsets, self.sizes, self.file, self._locate = offsets, sizes, file, locate

    @functools.cached_property
    def place(self) -> tuple[int, tuple[int, ...] | None]:
        """Return the offset of the first value in the file, and the strides; None: row-major."""
        return self._locate()

    def runs(self, shape: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
        """Yield runs of elements that are contiguous in the chunk and in the full tensor of that
        shape: (first element in the tensor, first element in the chunk, number of elements)."""
        dims = len(shape)
        inner = dims  # the chunk covers all dimensions from here on in full
        while inner > 0 and self.sizes[inner - 1] == shape[inner - 1]:
            inner -= 1
        outer = max(inner - 1, 0)  # the chunk covers part of this one, in one piece
        strides = [math.prod(shape[i + 1 :]) for i in range(dims)]
        length = math.prod(self.sizes[outer:])
        base = sum(o * s for o, s in zip(self.offsets, strides, strict=True))
        for number, index in enumerate(itertools.product(*map(range, self.sizes[:outer]))):
            start = base + sum(i * s for i, s in zip(index, strides[:outer], strict=True))
            yield start, number * length, length

    def read_into(self, memory: memoryview, first: int, dtype: torch.dtype) -> None:
        """Fill `memory` with row-major elements of the chunk, from `first` on."""
        item, (begin, strides) = dtype.itemsize, self.place
        if strides is None:
            self.file.read_into(memory, begin + first * item)
            return
        row, count = math.prod(self.sizes[1:]), len(memory) // item
        top, bottom = first // row, -(-(first + count) // row)
        rows = (bottom - top, *self.sizes[1:])
        held = torch.empty(extent(rows, strides), dtype=dtype)  # and elements between them
        self.file.read_into(bytes_of(held), begin + top * strides[0] * item)
        found = held.as_strided(rows, strides).reshape(-1)[first - top * row :]
        found = found[:count].contiguous()  # it may be a view
        memory[:] = bytes_of(found)


class Chunked:
    """A tensor in chunks."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], chunks: Sequence[Chunk]) -> None:
        self.dtype, self.shape, self._chunks = dtype, shape, chunks

    @property
    def files(self) -> list[str]:
        """The names of the files that contain it."""
        return sorted({os.path.basename(chunk.file.path) for chunk in self._chunks})

    def check(self) -> None:
        """Check the archives around the values of all chunks."""
        for chunk in self._chunks:
            _ = chunk.place

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the tensor's bytes, in row-major order, from byte `offset` on."""
        item = self.dtype.itemsize
        begin, end = offset // item, (offset + len(memory)) // item
        for chunk in self._chunks:
            for start, inner, length in chunk.runs(self.shape):
                low, high = max(start, begin), min(start + length, end)
                if low < high:
                    place = memory[(low - begin) * item : (high - begin) * item]
                    chunk.read_into(place, inner + low - start, self.dtype)


def covered(chunks: Sequence[Chunk]) -> int:
    """Return how many elements the chunks have; -1 if two chunks overlap."""
    ordered = sorted((c for c in chunks if math.prod(c.sizes)), key=lambda c: c.offsets)
    for i, one in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if one.offsets and other.offsets[0] >= one.offsets[0] + one.sizes[0]:
                break  # as are all later ones
            spans = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
            if all(a < d + e and d < a + b for a, b, d, e in spans):
                return -1
    return sum(math.prod(c.sizes) for c in ordered)
