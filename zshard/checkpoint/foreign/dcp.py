"""Folders that torch.distributed.checkpoint wrote, read as data.

Such a folder stores a tensor in chunks. Each chunk is a torch.save() file within a
larger file: a zip archive with the uncompressed values, and a pickle that describes them. All
pickles are read as data (pickled.py) and never executed; then any range of elements can be read
straight into place.

`.metadata` lists the tensors, their chunks, and the keys that led to each tensor in the nested dict
that was saved. These keys tell the model from its optimizer.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from zshard._errors import CheckpointError
from zshard.checkpoint.checkpoint import Checkpoint, OptimizerState, Readable
from zshard.checkpoint.contents import is_extra_state
from zshard.checkpoint.foreign.pickled import PickledObject, parse
from zshard.checkpoint.foreign.torch_file import (
    DTYPES,
    Stored,
    are_sizes,
    extent,
    value_in,
    values_at,
)
from zshard.checkpoint.manifest import LIMIT
from zshard.checkpoint.safetensors import OpenFile
from zshard.ranks.agreement import bytes_of

METADATA = ".metadata"

_MODELS = ("model", "model_state_dict", "state_dict", "module", "net")
_OPTIMIZERS = (
    "optimizer",
    "optim",
    "optimizer_state_dict",
    "optim_state_dict",
    "opt",
    "optimizer_0",
)
_PREFIX = "torch.distributed.checkpoint."

_T = TypeVar("_T")

KeyPath = tuple[Any, ...]  # keys of nested dicts and lists
Tensors = Mapping[KeyPath, Readable]
Values = Mapping[KeyPath, Callable[[], Any]]  # read when they are asked for


def open_into(found: Checkpoint, with_optimizer: bool) -> None:
    """Open the folder at `found.path`. Raise CheckpointError if it is damaged, or if its pickles
    cannot be read as plain data."""
    where = os.path.join(found.path, METADATA)
    with OpenFile(where) as file:
        text = bytes(file.bytes_of(min(file.size, LIMIT + 1)))
    read_metadata(found, text, where, with_optimizer)


def read_metadata(found: Checkpoint, text: bytes, where: str, with_optimizer: bool) -> None:
    """Fill `found` from the text of its metadata; messages refer to `where`."""
    tensors, values = _Folder(found, where, _parsed(text, where)).read()
    _sort_out(found, tensors, values, with_optimizer)


def _parsed(text: bytes, where: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise CheckpointError(f"cannot read '{where}' as plain data: {error}") from None


# --- which is the model's, and which the optimizer's ----------------------------------------------


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
    extra |= {path: functools.partial(_whole, entry) for path, entry in rest.items()}
    found.shared = {_dotted(path): read for path, read in extra.items()}
    if optimizer is not None and with_optimizer:
        told = {path: read() for path, read in _within(values, optimizer).items()}
        try:
            found.optimizer = _optimizer_of(_within(tensors, optimizer), told, list(found.model))
        except (KeyError, TypeError):
            found.no_optimizer = _NO_NAMES


def _within(things: Mapping[KeyPath, _T], root: KeyPath) -> dict[KeyPath, _T]:
    return {p[len(root) :]: each for p, each in things.items() if p[: len(root)] == root}


def _outside(things: Mapping[KeyPath, _T], roots: Sequence[KeyPath]) -> dict[KeyPath, _T]:
    return {p: each for p, each in things.items() if not any(p[: len(r)] == r for r in roots)}


def _whole(entry: Readable) -> torch.Tensor:
    made = torch.empty(entry.shape, dtype=entry.dtype)
    if made.numel() > 0:
        entry.read_into(bytes_of(made), 0)
    return made


def _under(names: Sequence[str], paths: Sequence[KeyPath]) -> KeyPath | None:
    """The shortest path of keys that ends with one of the names and has keys below it."""
    found = {
        path[: i + 1] for path in paths for i in range(min(2, len(path) - 1)) if path[i] in names
    }
    return min(found, key=lambda path: (len(path), names.index(path[-1])), default=None)


def _dotted(path: KeyPath) -> str:
    return ".".join(str(key) for key in path)


def _optimizer_of(
    tensors: Tensors, values: Mapping[KeyPath, Any], params: Sequence[str]
) -> OptimizerState:
    """Accept the forms of torch.distributed.checkpoint.state_dict: ("state", name, key) and
    ("param_groups", i, option); or flat, ("state.name.key",) and ("param_groups.name.option",); and
    that of optimizer.state_dict(), with numbers, for which the groups may give the names. Otherwise
    raise KeyError or TypeError."""
    if all(len(path) == 1 for path in (*tensors, *values)):
        return _flat_optimizer(tensors, values, set(params))
    groups: dict[int, dict[str, Any]] = {}
    for path, value in values.items():
        if path[:1] == ("param_groups",) and len(path) >= 3:
            _put(groups.setdefault(path[1], {}), path[2:], value)
    listed = [groups[i] for i in sorted(groups, key=str)]
    for group in listed:
        group.update({k: list(v.values()) for k, v in group.items() if _is_list(v)})
    names = _names_by_number(listed)
    state: dict[str, dict[str, Readable]] = {}
    others: dict[str, dict[str, Any]] = {}
    for kind, into in ((tensors, state), (values, others)):
        for path, value in kind.items():
            if path[:1] == ("state",):
                if len(path) != 3 or not isinstance(path[2], str):
                    raise KeyError(path)
                into.setdefault(_named(path[1], names), {})[path[2]] = value
    for group in listed:
        group["params"] = [_named(each, names) for each in group["params"]]
        group.pop("param_names", None)
    if not listed:
        raise KeyError("param_groups")
    return OptimizerState(None, listed, state, others)


def _flat_optimizer(
    tensors: Tensors, values: Mapping[KeyPath, Any], params: set[str]
) -> OptimizerState:
    """The flat form, in which each parameter has its own options."""
    state: dict[str, dict[str, Readable]] = {}
    others: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for kind, prefix, into in (
        (tensors, "state.", state),
        (values, "state.", others),
        (values, "param_groups.", options),
    ):
        for (key,), value in kind.items():
            if key.startswith(prefix):
                name, what = _split(key[len(prefix) :], params)
                into.setdefault(name, {})[what] = value
    if not options:
        raise KeyError("param_groups")
    return OptimizerState(None, [], state, others, options)


def _split(text: str, params: set[str]) -> tuple[str, str]:
    """Split "<parameter>.<rest>" into both. Raise KeyError if it begins with no parameter name."""
    ends = [i for i, letter in enumerate(text) if letter == "." and text[:i] in params]
    if not ends:
        raise KeyError(text)
    return text[: ends[-1]], text[ends[-1] + 1 :]


_NO_NAMES = (
    "it is keyed by unknown names; save the result of get_state_dict() of "
    "torch.distributed.checkpoint.state_dict, which uses names, or load the model alone"
)


def _put(into: dict[Any, Any], path: KeyPath, value: Any) -> None:
    for key in path[:-1]:
        into = into.setdefault(key, {})
        if not isinstance(into, dict):
            return
    into[path[-1]] = value


def _is_list(value: Any) -> bool:
    """Return whether it was a list. (Torch flattens lists that contain tensors.)"""
    return isinstance(value, dict) and list(value) == list(range(len(value))) and bool(value)


def _named(key: Any, names: Mapping[str, str]) -> Any:
    """A parameter's name; its number, where the file has no names (and numbers as text)."""
    return int(key) if not names and str(key).isdecimal() else names[str(key)]


def _names_by_number(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """{key of a parameter in the state, as text: name of the parameter}"""
    names: dict[str, str] = {}
    for group in groups:
        params = group.get("params", [])
        own = group.get("param_names", params)
        if isinstance(params, list) and isinstance(own, list) and len(params) == len(own):
            pairs = zip(params, own, strict=True)
            names.update((str(param), name) for param, name in pairs if isinstance(name, str))
    return names


# --- the metadata ---------------------------------------------------------------------------------


class _Folder:
    """The content of a folder, from its metadata."""

    def __init__(self, found: Checkpoint, where: str, metadata: Any) -> None:
        self._found, self._where = found, where
        if (
            not isinstance(metadata, PickledObject)
            or metadata.name != f"{_PREFIX}metadata.Metadata"
        ):
            raise CheckpointError(f"'{where}' is not torch.distributed.checkpoint metadata")
        self._metadata = metadata

    def read(self) -> tuple[Tensors, Values]:
        """Return tensors and other values by their paths."""
        try:
            storage = self._storage()
            paths = self._metadata.state.get("planner_data") or {}
            tensors: dict[KeyPath, Readable] = {}
            values: dict[KeyPath, Callable[[], Any]] = {}
            for name, told in self._metadata.field("state_dict_metadata").items():
                path = paths.get(name, tuple(name.split(".")))
                if not isinstance(path, tuple) or not path:
                    raise TypeError(f"invalid path {path!r:.200}")
                if told.name.endswith(".TensorStorageMetadata"):
                    tensors[path] = self._tensor(name, told, storage)
                else:
                    values[path] = functools.partial(value_in, storage[name, None], name)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointError(
                f"'{self._where}' is invalid torch.distributed.checkpoint metadata: {error!r:.150}"
            ) from None
        return tensors, values

    def _storage(self) -> dict[tuple[str, Any], Stored]:
        """The location of each chunk, by name and the chunk's first index."""
        made = {}
        for index, info in self._metadata.field("storage_data").items():
            name, offset = index.field("fqn"), index.state.get("offset")
            if info.state.get("transform_descriptors"):
                raise CheckpointError(
                    f"'{self._where}' stores '{name}' compressed, which is not supported: load it "
                    "with torch.distributed.checkpoint and save it again without extensions"
                )
            file = self._file(info.field("relative_path"))
            begin, length = info.field("offset"), info.field("length")
            if not are_sizes((begin, length)) or begin + length > file.size:
                raise CheckpointError(
                    f"'{file.path}' is too short: it has {file.size} bytes, but '{name}' is at "
                    f"bytes {begin} to {begin + length}"
                )
            made[name, offset] = Stored(file, begin, length)
        return made

    def _file(self, name: Any) -> OpenFile:
        if name not in self._found.files:
            if not isinstance(name, str) or set(name) & set("/\\\0") or name in ("", ".", ".."):
                raise CheckpointError(
                    f"'{self._where}' refers to {name!r:.80}, which is not a file in its folder"
                )
            path = os.path.join(self._found.path, name)
            if not os.path.lexists(path):
                raise CheckpointError(f"'{path}' is missing, but '{self._where}' refers to it")
            self._found.files[name] = OpenFile(path)
        return self._found.files[name]

    def _tensor(
        self, name: str, told: PickledObject, storage: Mapping[tuple[str, Any], Stored]
    ) -> Chunked:
        shape, dtype = told.field("size"), told.field("properties").state[0]
        if not are_sizes(shape) or getattr(dtype, "name", None) not in DTYPES:
            raise CheckpointError(
                f"'{self._where}' has an invalid shape or dtype for '{name}': {shape!r:.200}, "
                f"{dtype!r}"
            )
        chunks = []
        for each in told.field("chunks"):
            offsets, sizes = each.field("offsets"), each.field("sizes")
            if not (are_sizes(offsets) and are_sizes(sizes)) or any(
                begin + size > whole
                for begin, size, whole in zip(offsets, sizes, shape, strict=True)
            ):
                raise CheckpointError(
                    f"'{self._where}' has a chunk of '{name}' outside its shape {shape}"
                )
            chunks.append(Box(offsets, sizes, storage[name, offsets]))
        if covered(chunks) != math.prod(shape):
            raise CheckpointError(
                f"'{self._where}' has chunks of '{name}' that overlap or leave a gap"
            )
        return Chunked(name, DTYPES[dtype.name], shape, chunks)


def covered(chunks: Sequence[Box]) -> int:
    """Return how many elements the chunks have; -1 if two chunks overlap."""
    ordered = sorted((c for c in chunks if math.prod(c.sizes)), key=lambda c: c.offsets)
    for i, one in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if one.offsets and other.offsets[0] >= one.offsets[0] + one.sizes[0]:
                break  # and so are all that come later
            spans = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
            if all(a < d + e and d < a + b for a, b, d, e in spans):
                return -1
    return sum(math.prod(c.sizes) for c in ordered)


# --- tensors --------------------------------------------------------------------------------------


class Box(NamedTuple):
    """A box of a tensor: its first index, its shape, and its location."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stored: Stored


class Chunked:
    """A tensor in chunks."""

    def __init__(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], chunks: Sequence[Box]
    ) -> None:
        self.name, self.dtype, self.shape, self._chunks = name, dtype, shape, chunks
        self._payloads: dict[int, tuple[int, tuple[int, ...] | None]] = {}  # values_at() of a chunk

    @property
    def files(self) -> list[str]:
        """The names of the files that contain it."""
        return sorted({os.path.basename(chunk.stored.file.path) for chunk in self._chunks})

    def check(self) -> None:
        """Check the archives around the values of all chunks."""
        for i in range(len(self._chunks)):
            self._payload(i)

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the tensor's bytes, in row-major order, from byte `offset` on."""
        item = self.dtype.itemsize
        begin, end = offset // item, (offset + len(memory)) // item
        for i, chunk in enumerate(self._chunks):
            for start, inner, length in _runs(self.shape, chunk):
                low, high = max(start, begin), min(start + length, end)
                if low < high:
                    place = memory[(low - begin) * item : (high - begin) * item]
                    self._read_chunk(i, place, inner + low - start)

    def _payload(self, i: int) -> tuple[int, tuple[int, ...] | None]:
        if i not in self._payloads:
            chunk = self._chunks[i]
            self._payloads[i] = values_at(chunk.stored, self.name, self.dtype, chunk.sizes)
        return self._payloads[i]

    def _read_chunk(self, i: int, place: memoryview, first: int) -> None:
        """Fill `place` with row-major elements of a chunk, from `first` on."""
        file, sizes, item = self._chunks[i].stored.file, self._chunks[i].sizes, self.dtype.itemsize
        begin, strides = self._payload(i)
        if strides is None:
            file.read_into(place, begin + first * item)
            return
        row, count = math.prod(sizes[1:]), len(place) // item
        top, bottom = first // row, -(-(first + count) // row)
        rows = (bottom - top, *sizes[1:])
        held = torch.empty(extent(rows, strides), dtype=self.dtype)  # and what lies between them
        file.read_into(bytes_of(held), begin + top * strides[0] * item)
        found = held.as_strided(rows, strides).reshape(-1)[first - top * row :]
        found = found[:count].contiguous()  # it may be a view
        place[:] = bytes_of(found)


def _runs(shape: tuple[int, ...], chunk: Box) -> Iterator[tuple[int, int, int]]:
    """Runs of elements that are contiguous in the chunk and in the full tensor: (first element in
    the tensor, first element in the chunk, number of elements)."""
    dims = len(shape)
    inner = dims  # all dimensions from here on are whole in the chunk
    while inner > 0 and chunk.sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)  # of this one the chunk has a part, in one piece
    strides = [math.prod(shape[i + 1 :]) for i in range(dims)]
    length = math.prod(chunk.sizes[outer:])
    base = sum(o * s for o, s in zip(chunk.offsets, strides, strict=True))
    for number, index in enumerate(itertools.product(*map(range, chunk.sizes[:outer]))):
        start = base + sum(i * s for i, s in zip(index, strides[:outer], strict=True))
        yield start, number * length, length
