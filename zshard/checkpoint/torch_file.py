"""Read pickles and torch.save() files as data: plain values, and the location of a tensor's values.

The standard library's unpickler reads a pickle, with the opcodes that data needs and an
allow-list of names. It imports and calls nothing that a pickle names: a name becomes an inert
Record, or plain data by a constructor of this module. So a malicious pickle is only an error.

A torch.save() file is a zip archive with one uncompressed member per storage, and a pickle that
describes them. Tensors are read directly from their place in the file. torch.load() could not map
them: the files of torch.distributed.checkpoint contain many such files in a row.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Collection, Iterator
from typing import Any, ClassVar, NamedTuple

import torch

from zshard._errors import CheckpointError
from zshard.checkpoint.safetensors import CODES, OpenFile

DTYPES = {str(dtype): dtype for dtype in CODES}
"""By their names in pickles."""

_DEPTH = 400  # levels; Python's own functions recurse to less than 1000
_SHARED = 100_000  # values beyond the number that fits in the bytes
_KEY = 100  # values of a tuple that is a key of a dict, and keys with one hash


class NotPlainError(ValueError):
    """A pickle is valid, but its content is not plain data of a size in proportion to its
    length."""


class NoDataError(CheckpointError):
    """A value is not plain data; everything else is valid."""


# --- pickles --------------------------------------------------------------------------------------


class Record:
    """A class or function that a pickle names, or the result of calling it."""

    __slots__ = ("_make", "args", "name", "state")

    def __init__(
        self,
        name: str,
        args: tuple[Any, ...] | None = None,
        make: Callable[..., object] | None = None,
    ) -> None:
        """make: makes the result of a call from its arguments; None: that is another Record."""
        self.name = name  # dotted
        self.args = args  # None: not called
        self.state: Any = None  # what __setstate__() would have received
        self._make = make

    def __repr__(self) -> str:
        return self.name if self.args is None else f"{self.name}(...)"

    def field(self, name: str) -> Any:
        """Return an attribute from its state. Raise KeyError if it lacks that."""
        if not isinstance(self.state, dict):
            raise KeyError(name)
        return self.state[name]

    def __call__(self, *args: object) -> object:  # the unpickler calls it
        if self.args is not None:
            raise TypeError("the result of a call is not callable")
        return Record(self.name, args) if self._make is None else self._make(*args)

    def __setstate__(self, state: object) -> None:  # the unpickler calls it
        if self.args is None:
            raise ValueError("it sets the state of an object that has none")
        self.state = state


class _Dict(dict[Any, Any]):
    """A dict that checks a key before hashing it: hashing a tuple takes time and stack for
    everything in it, and keys that share a hash are compared one by one."""

    __slots__ = ("_hashes",)

    def __setitem__(self, key: object, value: object) -> None:
        if type(key) in (int, float, tuple):  # Python does not salt the hashes of these
            self._check(key)
        super().__setitem__(key, value)

    def _check(self, key: object) -> None:
        if type(key) is tuple and not _is_tree(key, _KEY):
            raise ValueError(f"it has a dict key of more than {_KEY} values")
        if key not in self:
            if not hasattr(self, "_hashes"):
                self._hashes: dict[int, int] = {}
            same = self._hashes[hash(key)] = self._hashes.get(hash(key), 0) + 1
            if same > _KEY:
                raise ValueError(f"it has a dict with more than {_KEY} keys of one hash")

    def __setstate__(self, state: object) -> None:
        """Ignore attributes, which an OrderedDict may have."""


_OPCODES = (
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("EMPTY_LIST", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
    *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
    *("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "BINPERSID"),
)
_ALIKE = {  # opcodes that are equivalent for data: sets become lists
    **{"NEWOBJ": "REDUCE", "EMPTY_SET": "EMPTY_LIST", "ADDITEMS": "APPENDS", "FROZENSET": "LIST"},
    **{name: name for name in _OPCODES},
}


def _code(name: str) -> int:
    return int(getattr(pickle, name)[0])


class _Unpickler(pickle._Unpickler):
    """The standard library's unpickler in Python: a subclass can choose its opcodes and dicts."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        _code(name): pickle._Unpickler.dispatch[_code(same)] for name, same in _ALIKE.items()
    }

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._encode = functools.cache(_encoded)  # a text that repeats is copied once

    def find_class(self, module: str, name: str) -> Record:
        full = f"{module}.{name}"
        if full == "_codecs.encode":  # protocol 2 writes bytes like this
            return Record(full, make=self._encode)
        if full not in _PLAIN and module.partition(".")[0] not in ("torch", "pathlib"):
            raise NotPlainError(f"it contains {full:.200}")
        return Record(full, make=_PLAIN.get(full))

    def persistent_load(self, key: object) -> Record:
        return Record("persistent", (key,))

    def load_empty_dict(self) -> None:
        self.append(_Dict())  # type: ignore[attr-defined]

    dispatch[_code("EMPTY_DICT")] = load_empty_dict


def parse(data: bytes) -> object:
    """Return the content of a pickle: None, bool, int, float, str, bytes, tuples, lists, dicts,
    sets (as lists), and Records of torch's classes. Raise ValueError if it is damaged.

    torch.Size becomes a tuple; OrderedDict, defaultdict and Counter become dicts; a deque becomes a
    list; NumPy numbers become Python numbers. Raises NotPlainError if it names another class, if a
    value contains itself, or if the result is far larger than `data` because it repeats values.
    """
    try:
        value = _Unpickler(data).load()
    except NotPlainError:
        raise
    except Exception as error:
        raise ValueError(f"it is damaged: {error!r:.200}") from None
    if not _is_tree(value, _SHARED + 4 * len(data)):
        raise NotPlainError("it contains itself, is nested too deeply, or repeats itself too often")
    return value


def _is_tree(value: object, most: int) -> bool:
    """Return whether it has at most `most` values, counting repeated values each time, on at most
    _DEPTH levels. That bounds the time to walk, print or hash it."""
    level = [value]
    for _ in range(_DEPTH):
        inner: list[Collection[object]] = []
        for each in level:
            if isinstance(each, Record):
                inner.append((each.args, each.state))
            elif isinstance(each, dict):
                inner += each.keys(), each.values()
            elif isinstance(each, list | tuple):
                inner.append(each)
        most -= sum(map(len, inner))
        if most < 0 or not inner:
            return most >= 0
        level = [e for e in itertools.chain(*inner) if isinstance(e, Record | dict | list | tuple)]
    return False


def _plain(value: object) -> object:
    """Return the value with plain dicts. Raise NotPlainError for a Record."""
    if isinstance(value, Record):
        raise NotPlainError(f"it contains {value!r}")
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(each) for each in value)
    return value


# --- plain data that pickles write as calls -------------------------------------------------------

# NumPy dtype name: struct format.
_NUMBERS = {"f2": "e", "f4": "f", "f8": "d", "b1": "?"}
_NUMBERS |= {"i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q"}


def _encoded(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"unknown encoding {encoding!r:.40}")
    return text.encode("latin-1")


def _number(dtype: Record, data: bytes) -> object:
    if dtype.name != "numpy.dtype" or dtype.args is None or dtype.state[1] not in ("<", "|"):
        raise TypeError("expected a little-endian number")
    return struct.unpack(f"<{_NUMBERS[dtype.args[0]]}", data)[0]


def _list(values: object = (), *_: object) -> object:
    if not isinstance(values, list) and values != ():
        raise TypeError("expected a list")
    return values or []


def _dict(values: object = None, *_: object) -> object:
    return values if isinstance(values, dict) else _Dict()  # a defaultdict has its factory here


def _size(values: object) -> object:
    if not isinstance(values, tuple):
        raise TypeError("expected a tuple")
    return values


_BUILTINS = ("builtins", "__builtin__")  # the latter in protocol 2

# Names that a pickle may use beside torch's classes; None: only as a Record.
_PLAIN: dict[str, Callable[..., object] | None] = {
    "torch.Size": _size,
    **{f"collections.{name}": _dict for name in ("OrderedDict", "defaultdict", "Counter")},
    "collections.deque": _list,
    **{f"{b}.{name}": _list for b in _BUILTINS for name in ("set", "frozenset")},
    **{f"{b}.{name}": None for b in _BUILTINS for name in ("int", "long", "float", "list", "dict")},
    "builtins.getattr": None,  # some versions of Python write members of an Enum like this
    **{f"numpy.{core}.multiarray.scalar": _number for core in ("_core", "core")},
    "numpy.dtype": None,
}


# --- archives -------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """A torch.save() file within a file."""

    file: OpenFile
    offset: int
    length: int


class _FileRange(io.RawIOBase):
    """A range of a file, as a file object."""

    def __init__(self, stored: Stored) -> None:
        self._stored, self._at = stored, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._stored.length}[whence]
        if base + offset < 0:
            raise ValueError("negative seek position")
        self._at = base + offset
        return self._at

    def readinto(self, memory: Any) -> int:
        count = max(0, min(len(memory), self._stored.length - self._at))
        if count:
            place = memoryview(memory).cast("B")[:count]
            self._stored.file.read_into(place, self._stored.offset + self._at)
            self._at += count
        return count


@contextlib.contextmanager
def _opened(stored: Stored, name: str) -> Iterator[zipfile.ZipFile]:
    """Context manager with an open archive. Any error in the archive becomes a CheckpointError."""
    try:
        with zipfile.ZipFile(io.BufferedReader(_FileRange(stored), 4096)) as archive:
            yield archive
    except (CheckpointError, NotPlainError):
        raise
    except Exception as error:
        why = str(error) or type(error).__name__
        if "not a zip file" in why:
            why += ", which torch.save() writes since torch 1.6: save it again with a current torch"
        raise _damaged(stored, name, why) from None


def _damaged(stored: Stored, name: str, why: object) -> CheckpointError:
    return CheckpointError(
        f"'{stored.file.path}' is damaged at bytes {stored.offset} to "
        f"{stored.offset + stored.length} ('{name}'): {why}"
    )


def _member(archive: zipfile.ZipFile, stored: Stored, end: str) -> zipfile.ZipInfo:
    """Return the member whose name ends with `end`. Raise KeyError if there is none, and ValueError
    if it is compressed, which torch's members never are: decompressed data could have any size."""
    for info in archive.infolist():
        if info.filename.endswith(end):
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > stored.length:
                raise ValueError(f"its member {end} is compressed, or longer than the archive")
            return info
    raise KeyError(f"it has no member {end}")


def value_in(stored: Stored, name: str) -> object:
    """Return a saved value that is not a tensor. Raise CheckpointError if it is damaged, and
    NoDataError if it is not plain data."""
    try:
        with _opened(stored, name) as archive:
            return _plain(parse(archive.read(_member(archive, stored, "/data.pkl"))))
    except NotPlainError as error:
        raise NoDataError(
            f"cannot read '{name}' in '{stored.file.path}' as plain data: {error}; save numbers, "
            "strings, lists and dicts in place of objects"
        ) from None


def values_at(
    stored: Stored, name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> tuple[int, tuple[int, ...] | None]:
    """Return the offset in the file of a tensor's first value, and its strides, in elements; None:
    the values are in row-major order."""
    try:
        with _opened(stored, name) as archive:
            told = parse(archive.read(_member(archive, stored, "/data.pkl")))
            key, first, found, strides, kind = _tensor_of(told)
            info = _member(archive, stored, f"/data/{key}")
            order = archive.read(_member(archive, stored, "/byteorder")).strip()
    except NotPlainError as error:
        raise _damaged(stored, name, f"expected a plain tensor, but {error}") from None
    if kind != dtype or found != shape or len(strides) != len(shape) or order != b"little":
        raise _damaged(stored, name, f"unexpected tensor: shape {found}, {kind}, strides {strides}")
    size = dtype.itemsize
    if info.file_size < (first + extent(shape, strides)) * size:
        raise _damaged(stored, name, "its values are incomplete")
    head = stored.file.bytes_of(30, stored.offset + info.header_offset)
    lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    begin = info.header_offset + 30 + lengths
    if head[:4] != b"PK\3\4" or begin + info.file_size > stored.length:
        raise _damaged(stored, name, "its values are outside the archive")
    return stored.offset + begin + first * size, None if _is_row_major(shape, strides) else strides


def are_sizes(values: object) -> bool:
    """Return whether it is a tuple of non-negative integers."""
    return isinstance(values, tuple) and all(type(v) is int and 0 <= v < 2**63 for v in values)


def extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return how many elements the tensor spans in memory, from its first to its last one."""
    if math.prod(shape) == 0:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


_STORAGES = {
    **{"Float": torch.float32, "Double": torch.float64, "Half": torch.float16},
    **{"BFloat16": torch.bfloat16, "Byte": torch.uint8, "Char": torch.int8},
    **{"Short": torch.int16, "Int": torch.int32, "Long": torch.int64},
    **{"Bool": torch.bool, "ComplexFloat": torch.complex64},
}


def _tensor_of(told: object) -> tuple[str, int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Return (name of the storage, first element there, shape, strides, dtype) of a saved
    tensor."""
    while isinstance(told, Record) and told.name == "torch._utils._rebuild_parameter":
        told = (told.args or ())[0]
    if not isinstance(told, Record) or not told.name.startswith("torch._utils._rebuild_tensor_v"):
        raise ValueError(f"expected a plain tensor, got {told!r}")
    storage, first, shape, strides, *more = told.args or ()
    tag, kind, key, *_ = storage.args[0]
    if tag != "storage" or not are_sizes((first,)) or not (are_sizes(shape) and are_sizes(strides)):
        raise ValueError("expected a plain tensor")
    if told.name.endswith("_v3"):
        dtype = DTYPES[more[2].name]
    else:
        dtype = _STORAGES[kind.name.removeprefix("torch.").removesuffix("Storage")]
    return str(key), first, shape, strides, dtype


def _is_row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if math.prod(shape) == 0:
        return True
    wanted = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return all(n == 1 or a == b for n, a, b in zip(shape, strides, wanted, strict=True))
