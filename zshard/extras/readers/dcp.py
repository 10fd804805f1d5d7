"""Folders written by torch.distributed.checkpoint in torch's own format.

Each chunk of a tensor is a torch.save() file within a larger file. `.metadata`, a pickle, lists the
tensors, their chunks, and the keys that led to each tensor in the nested dict that was saved; these
keys distinguish the model from its optimizer.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from zshard.api import CODES, Checkpoint, CheckpointError, OpenFile
from zshard.extras.readers.chunked import Chunked
from zshard.extras.readers.other_states import KeyPath, optimizer_of_paths
from zshard.extras.readers.torch_file import (
    NoDataError,
    Record,
    Stored,
    StoredTensor,
    parse,
    reading,
)

METADATA = ".metadata"
_LIMIT = 2**30  # bytes of it

_MODELS = ("model", "model_state_dict", "state_dict", "module", "net")
_OPTIMIZERS = (
    *("optimizer", "optim", "optimizer_state_dict", "optim_state_dict", "opt"),
    "optimizer_0",
)
_NO_NAMES = "it is keyed by unknown names; save the result of torch's get_state_dict()"
Entries = Mapping[KeyPath, Chunked | Stored]


def open_into(checkpoint: Checkpoint, with_optimizer: bool) -> None:
    """Open the folder at `checkpoint.path`. Raise CheckpointError if it is damaged, or if its
    pickles are not plain data.

    Entries under a key like "model" belong to the model, and those under a key like "optimizer" to
    the optimizer, at the top level or one below. Without the former, the top level is the model.
    """
    where = os.path.join(checkpoint.path, METADATA)
    with OpenFile(where) as file, reading(f"'{where}'"):
        metadata = parse(bytes(file.bytes_of(min(file.size, _LIMIT + 1))))
        entries = _entries(checkpoint, where, metadata)
    roots = _root(_MODELS, entries), _root(_OPTIMIZERS, entries)
    model, optimizer = (
        {path[len(root) :]: each for path, each in entries.items() if path[: len(root)] == root}
        for root in roots
    )
    rest = {p: e for p, e in entries.items() if not any(p[: len(r)] == r for r in roots)}
    if not model:
        tensors = [path for path, entry in rest.items() if isinstance(entry, Chunked)]
        paths = [path for path in tensors if len(path) == 1] or tensors
        extra = [path for path in rest if str(path[-1]).split(".")[-1] == "_extra_state"]
        paths += [path for path in extra if path not in tensors]
        model = {path: rest.pop(path) for path in paths}
    checkpoint.model = {_dotted(p): e for p, e in model.items() if isinstance(e, Chunked)}
    checkpoint.others = {_dotted(p): e.value() for p, e in model.items() if isinstance(e, Stored)}
    checkpoint.shared = functools.partial(_values, {_dotted(p): e.value for p, e in rest.items()})
    if optimizer and with_optimizer:
        states = {p: e for p, e in optimizer.items() if isinstance(e, Chunked)}
        values = {p: e.value() for p, e in optimizer.items() if isinstance(e, Stored)}
        try:
            checkpoint.optimizer = optimizer_of_paths(states, values, list(checkpoint.model))
        except (KeyError, TypeError):
            checkpoint.no_optimizer = _NO_NAMES


def _values(entries: Mapping[str, Callable[[], Any]], strict: bool) -> dict[str, Any]:
    values = {}
    for name, read in entries.items():
        try:
            values[name] = read()
        except NoDataError as error:
            if strict:
                raise NoDataError(f"{error}; pass strict=False to skip it") from None
            warnings.warn(f"{error}; skipped", stacklevel=2)
    return values


def _root(names: Sequence[str], paths: Iterable[KeyPath]) -> KeyPath:
    """Return the shortest path of keys that ends with one of the names and has keys below it, or a
    path that nothing is below."""
    roots = {
        path[: i + 1] for path in paths for i in range(min(2, len(path) - 1)) if path[i] in names
    }
    return min(roots, key=lambda path: (len(path), names.index(path[-1])), default=(None,))


def _dotted(path: KeyPath) -> str:
    return ".".join(str(key) for key in path)


def _entries(checkpoint: Checkpoint, where: str, metadata: object) -> Entries:
    """Return tensors and other values by their paths. Nothing in the metadata is hashed or printed
    before its type is known."""
    if not isinstance(metadata, Record) or metadata.name != "Metadata":
        raise CheckpointError(f"'{where}' is not torch.distributed.checkpoint metadata")
    places = {}
    for index, info in metadata.state["storage_data"].items():
        begin = index.state.get("offset")
        places[_text(index.state["fqn"]), None if begin is None else _sizes(begin)] = info.state
    paths = metadata.state.get("planner_data") or {}
    kept: dict[StoredTensor, torch.Tensor] = {}
    entries: dict[KeyPath, Chunked | Stored] = {}
    for name, kind in metadata.state["state_dict_metadata"].items():
        path = paths.get(name, tuple(_text(name).split(".")))
        if not isinstance(path, tuple) or not path or not all(type(k) in (str, int) for k in path):
            raise ValueError(f"it has an invalid path for '{name}'")
        if kind.name != "TensorStorageMetadata":
            entries[path] = _place(checkpoint, where, name, places[name, None])
            continue
        dtype, chunks = kind.state["properties"].state[0], []
        if not isinstance(dtype, torch.dtype) or dtype not in CODES:
            raise CheckpointError(f"'{name}' in '{where}' has an unsupported dtype: convert it")
        for chunk in kind.state["chunks"]:
            begin, shape = _sizes(chunk.state["offsets"]), _sizes(chunk.state["sizes"])
            place = _place(checkpoint, where, name, places[name, begin])
            chunks.append((begin, StoredTensor(place, dtype, shape, kept)))
        what = f"'{name}' in '{where}'"
        entries[path] = Chunked(what, _sizes(kind.state["size"]), dtype, chunks)
    return entries


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("expected a string")
    return value


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, torch.Size) or any(size < 0 for size in value):
        raise TypeError("expected non-negative sizes")
    return tuple(value)


def _place(checkpoint: Checkpoint, where: str, name: str, info: Mapping[str, Any]) -> Stored:
    if info.get("transform_descriptors"):
        raise CheckpointError(f"'{where}' stores '{name}' compressed: save it without extensions")
    inside, begin, length = _text(info["relative_path"]), info["offset"], info["length"]
    if set(inside) & set("/\\\0") or inside in ("", ".", ".."):
        raise CheckpointError(f"'{where}' refers to {inside!r:.80}, which is not in its folder")
    path = os.path.join(checkpoint.path, inside)
    if inside not in checkpoint.files:
        if not os.path.lexists(path):
            raise CheckpointError(
                f"'{path}' is missing, but '{where}' refers to it: copy it as well"
            )
        checkpoint.files[inside] = OpenFile(path)
    file = checkpoint.files[inside]
    if not 0 <= begin <= begin + length <= file.size:
        range_ = f"'{name}' is at bytes {begin} to {begin + length}"
        raise CheckpointError(f"'{path}' has {file.size} bytes, but {range_}: copy it again")
    return Stored(file, begin, length, name)
