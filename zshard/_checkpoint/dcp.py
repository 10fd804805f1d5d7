"""Folders that torch.distributed.checkpoint wrote, read as data.

The one idea: a tensor lies there in chunks, each of which is a file of torch.save() within a larger
file: a zip with the values, stored as they are, and a pickle that says what they are. All pickles
are read as data (pickled.py), never run; then the values of any range of elements can be read
straight to where they belong.

`.metadata` says which tensors there are, of which chunks, and by which keys each was reached in the
nested dict that was saved. By these keys a model is told from its optimizer.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from zshard._agree import bytes_of
from zshard._checkpoint.checkpoint import Checkpoint, OptimizerState, Readable
from zshard._checkpoint.manifest import LIMIT, CheckpointError
from zshard._checkpoint.outline import is_extra_state
from zshard._checkpoint.pickled import Thing, parse
from zshard._checkpoint.safetensors import File
from zshard._checkpoint.torch_file import DTYPES, Stored, are_sizes, value_in, values_begin

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

Path = tuple[Any, ...]  # keys of nested dicts and lists
Tensors = Mapping[Path, Readable]
Values = Mapping[Path, Callable[[], Any]]  # read when they are asked for


def open_into(found: Checkpoint, with_optimizer: bool) -> None:
    """Opens the folder at `found.path`. CheckpointError for what is damaged, or cannot be read
    without running it."""
    where = os.path.join(found.path, METADATA)
    with File(where) as file:
        text = bytes(file.bytes_of(min(file.size, LIMIT + 1)))
    read_metadata(found, text, where, with_optimizer)


def read_metadata(found: Checkpoint, text: bytes, where: str, with_optimizer: bool) -> None:
    """Gives `found` what its metadata say; their path is for messages."""
    tensors, values = _Folder(found, where, _parsed(text, where)).read()
    _sort_out(found, tensors, values, with_optimizer)


def _parsed(text: bytes, where: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise CheckpointError(f"'{where}' cannot be read without running it: {error}") from None


# --- which is the model's, and which the optimizer's ----------------------------------------------


def _sort_out(found: Checkpoint, tensors: Tensors, values: Values, with_optimizer: bool) -> None:
    """What lies under a key like "model" is the model's, and what under one like "optimizer" the
    optimizer's, at the top or one below. Without the former, the model's are those at the top."""
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


def _within(things: Mapping[Path, _T], root: Path) -> dict[Path, _T]:
    return {p[len(root) :]: each for p, each in things.items() if p[: len(root)] == root}


def _outside(things: Mapping[Path, _T], roots: Sequence[Path]) -> dict[Path, _T]:
    return {p: each for p, each in things.items() if not any(p[: len(r)] == r for r in roots)}


def _whole(entry: Readable) -> torch.Tensor:
    made = torch.empty(entry.shape, dtype=entry.dtype)
    if made.numel() > 0:
        entry.read_into(bytes_of(made), 0)
    return made


def _under(names: Sequence[str], paths: Sequence[Path]) -> Path | None:
    """The shortest path of keys that ends with one of the names and leads to several more."""
    found = {
        path[: i + 1] for path in paths for i in range(min(2, len(path) - 1)) if path[i] in names
    }
    return min(found, key=lambda path: (len(path), names.index(path[-1])), default=None)


def _dotted(path: Path) -> str:
    return ".".join(str(key) for key in path)


def _optimizer_of(
    tensors: Tensors, values: Mapping[Path, Any], params: Sequence[str]
) -> OptimizerState:
    """The forms of torch.distributed.checkpoint.state_dict: ("state", name, key) and
    ("param_groups", i, option), by numbers only where the groups have names as well; or flat,
    ("state.name.key",) and ("param_groups.name.option",). KeyError or TypeError for any other."""
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
                into.setdefault(names[str(path[1])], {})[path[2]] = value
    for group in listed:
        group["params"] = [names[str(each)] for each in group["params"]]
        group.pop("param_names", None)
    if not listed:
        raise KeyError("param_groups")
    return OptimizerState(None, listed, state, others)


def _flat_optimizer(
    tensors: Tensors, values: Mapping[Path, Any], params: set[str]
) -> OptimizerState:
    """The flat form, in which each parameter has options of its own."""
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
    """(name of a parameter, what stands behind it and a dot). KeyError if there is none."""
    ends = [i for i, letter in enumerate(text) if letter == "." and text[:i] in params]
    if not ends:
        raise KeyError(text)
    return text[: ends[-1]], text[ends[-1] + 1 :]


_NO_NAMES = (
    "its optimizer's state goes by numbers, or by unknown names: save what get_state_dict() of "
    "torch.distributed.checkpoint.state_dict gives, which has names; the model can be loaded alone"
)


def _put(into: dict[Any, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        into = into.setdefault(key, {})
        if not isinstance(into, dict):
            return
    into[path[-1]] = value


def _is_list(value: Any) -> bool:
    """Was it a list? (Torch flattens lists that have tensors in them.)"""
    return isinstance(value, dict) and list(value) == list(range(len(value))) and bool(value)


def _names_by_number(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """{what the state calls a parameter, as text: its name}"""
    names: dict[str, str] = {}
    for group in groups:
        params = group.get("params", [])
        own = group.get("param_names", params)
        if isinstance(params, list) and isinstance(own, list) and len(params) == len(own):
            pairs = zip(params, own, strict=True)
            names.update((str(param), name) for param, name in pairs if isinstance(name, str))
    return names


# --- what the metadata say ------------------------------------------------------------------------


class _Folder:
    """What is in a folder, from its metadata."""

    def __init__(self, found: Checkpoint, where: str, metadata: Any) -> None:
        self._found, self._where = found, where
        if not isinstance(metadata, Thing) or metadata.name != f"{_PREFIX}metadata.Metadata":
            raise CheckpointError(f"'{where}' is not what torch.distributed.checkpoint writes")
        self._metadata = metadata

    def read(self) -> tuple[Tensors, Values]:
        """Tensors and other values by their paths."""
        try:
            storage = self._storage()
            paths = self._metadata.state.get("planner_data") or {}
            tensors: dict[Path, Readable] = {}
            values: dict[Path, Callable[[], Any]] = {}
            for name, told in self._metadata.field("state_dict_metadata").items():
                path = paths.get(name, tuple(name.split(".")))
                if told.name.endswith(".TensorStorageMetadata"):
                    tensors[path] = self._tensor(name, told, storage)
                else:
                    values[path] = functools.partial(value_in, storage[name, None], name)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointError(
                f"'{self._where}' is not as torch.distributed.checkpoint writes it: {error!r}"
            ) from None
        return tensors, values

    def _storage(self) -> dict[tuple[str, Any], Stored]:
        """Where each chunk of each name lies, by the name and the chunk's first index."""
        made = {}
        for index, info in self._metadata.field("storage_data").items():
            name, offset = index.field("fqn"), index.state.get("offset")
            if info.state.get("transform_descriptors"):
                raise CheckpointError(
                    f"'{self._where}' has '{name}' compressed: load it with "
                    "torch.distributed.checkpoint, and save it without extensions"
                )
            file = self._file(info.field("relative_path"))
            begin, length = info.field("offset"), info.field("length")
            if not are_sizes((begin, length)) or begin + length > file.size:
                raise CheckpointError(
                    f"'{file.path}' of {file.size} bytes is too short: '{name}' should lie at "
                    f"bytes {begin} to {begin + length}"
                )
            made[name, offset] = Stored(file, begin, length)
        return made

    def _file(self, name: Any) -> File:
        if name not in self._found.files:
            if not isinstance(name, str) or set(name) & set("/\\\0") or name in ("", ".", ".."):
                raise CheckpointError(f"'{self._where}' names {name!r:.80}, no file of its folder")
            path = os.path.join(self._found.path, name)
            if not os.path.lexists(path):
                raise CheckpointError(f"'{path}' is missing, which '{self._where}' names")
            self._found.files[name] = File(path)
        return self._found.files[name]

    def _tensor(self, name: str, told: Thing, storage: Mapping[tuple[str, Any], Stored]) -> Chunked:
        shape, dtype = told.field("size"), told.field("properties").state[0]
        if not are_sizes(shape) or getattr(dtype, "name", None) not in DTYPES:
            raise CheckpointError(f"'{self._where}' has '{name}' of shape {shape!r}, {dtype!r}")
        chunks = []
        for each in told.field("chunks"):
            offsets, sizes = each.field("offsets"), each.field("sizes")
            if not (are_sizes(offsets) and are_sizes(sizes)) or any(
                begin + size > whole
                for begin, size, whole in zip(offsets, sizes, shape, strict=True)
            ):
                raise CheckpointError(
                    f"'{self._where}' has a chunk of '{name}' that is not within {shape}"
                )
            chunks.append(Chunk(offsets, sizes, storage[name, offsets]))
        if covered(chunks) != math.prod(shape):
            raise CheckpointError(f"'{self._where}' has not all of '{name}' once")
        return Chunked(name, DTYPES[dtype.name], shape, chunks)


def covered(chunks: Sequence[Chunk]) -> int:
    """How many elements the chunks have; -1 where two have the same."""
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


class Chunk(NamedTuple):
    """A box of a tensor: its first index, its shape, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stored: Stored


class Chunked:
    """A tensor in chunks."""

    def __init__(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], chunks: Sequence[Chunk]
    ) -> None:
        self.name, self.dtype, self.shape, self._chunks = name, dtype, shape, chunks
        self._payloads: dict[int, int] = {}  # of a chunk, its first byte in the file

    @property
    def files(self) -> list[str]:
        """The names of the files that have it."""
        return sorted({os.path.basename(chunk.stored.file.path) for chunk in self._chunks})

    def check(self) -> None:
        """Looks at what stands around the values in all chunks."""
        for i in range(len(self._chunks)):
            self._payload(i)

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fills `memory`, of bytes, with the tensor's own, row-major, from byte `offset` on."""
        item = self.dtype.itemsize
        begin, end = offset // item, (offset + len(memory)) // item
        for i, chunk in enumerate(self._chunks):
            for start, inner, length in _runs(self.shape, chunk):
                low, high = max(start, begin), min(start + length, end)
                if low < high:
                    place = memory[(low - begin) * item : (high - begin) * item]
                    at = self._payload(i) + (inner + low - start) * item
                    chunk.stored.file.read_into(place, at)

    def _payload(self, i: int) -> int:
        if i not in self._payloads:
            chunk = self._chunks[i]
            self._payloads[i] = values_begin(chunk.stored, self.name, self.dtype, chunk.sizes)
        return self._payloads[i]


def _runs(shape: tuple[int, ...], chunk: Chunk) -> Iterator[tuple[int, int, int]]:
    """Elements of a chunk that lie side by side in the whole tensor as well: (the first one's
    number there, and in the chunk, how many)."""
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
