"""Pickles and files of torch.save(), which others may have written.

The standard library's unpickler reads pickles with an allow-list of names. Each stands for plain
data or an inert Record: nothing that a file names is imported or called. torch.load() reads a
tensor, but only after this unpickler has passed its pickle: on its own, torch.load() hashes tuples
of any depth as keys of a dict, which overflows the stack.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, ClassVar, cast

import torch

from zshard.api import CheckpointError, OpenFile, bytes_of


class NoDataError(CheckpointError):
    """A value is not plain data; everything else is valid."""


class Record:
    """An object in a pickle: the name of its class, the arguments that made it, and its state."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, *args: Any) -> None:
        self.name, self.args = name, args
        self.state: Any = None


def _records(module: str, *names: str) -> dict[str, Any]:
    return {f"{module}.{name}": functools.partial(Record, name) for name in names}


_NUMBERS = {"f2": "e", "f4": "f", "f8": "d", "b1": "?"}  # NumPy's dtypes, for struct
_NUMBERS |= {"i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q"}


def _number(dtype: Record, data: bytes) -> object:
    return struct.unpack(dtype.state[1].replace("|", "<") + _NUMBERS[dtype.args[0]], data)[0]


_DCP, _PATHS = "torch.distributed.checkpoint", ("PosixPath", "WindowsPath")
_NAMES: dict[str, Any] = {  # what each name of a pickle stands for
    "collections.OrderedDict": lambda: {},
    "torch.Size": torch.Size,
    "_codecs.encode": lambda text, _latin1: text.encode("latin-1"),  # bytes, in protocol 2
    **{f"numpy.{core}.multiarray.scalar": _number for core in ("_core", "core")},
    **_records("numpy", "dtype"),
    **{str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)},
    **{
        f"{k.__module__}.{k.__name__}": getattr(k, "_dtype", Record) for k in torch._storage_classes
    },
    **_records("torch._utils", "_rebuild_tensor_v2", "_rebuild_tensor_v3"),
    **_records(f"{_DCP}.metadata", "Metadata", "MetadataIndex", "StorageMeta"),
    **_records(f"{_DCP}.metadata", "TensorStorageMetadata", "BytesStorageMetadata"),
    **_records(f"{_DCP}.metadata", "ChunkStorageMetadata", "TensorProperties"),
    **_records(f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    **_records(f"{_DCP}.filesystem", "_StorageInfo"),
    **_records("torch.serialization", "_get_layout"),
    **_records("builtins", "getattr"),  # some versions of Python write members of an Enum like this
    **_records("pathlib", *_PATHS),
    **_records("pathlib._local", *_PATHS),  # Python 3.13
}


class _Unpickler(pickle._Unpickler):
    """Unlike the one in C, it allocates no memory that a pickle merely asks for, and a subclass can
    check keys before they are hashed, which takes time and stack for everything in them."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if code not in b"d\x82\x83\x84\x8f\x90\x91\x96"  # other dicts, sets, names by number
    }
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in _NAMES:
            raise NoDataError(f"it contains {full:.200}")
        return _NAMES[full]

    def persistent_load(self, key: Any) -> Any:
        _check_plain([key[0], *key[2:]], 100)  # torch.load() hashes and prints it
        return key

    def _build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Record):
            self.stack[-1].state = state
        elif not isinstance(self.stack[-1], dict):  # an OrderedDict may have attributes
            raise ValueError("it sets the state of an object that has none")

    def _set(self, items: list[Any]) -> None:
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, Record):
                _check_plain(key, 100)
            self.stack[-1][key] = value

    dispatch[pickle.BUILD[0]] = _build
    dispatch[pickle.SETITEM[0]] = lambda self: self._set([self.stack.pop(-2), self.stack.pop()])
    dispatch[pickle.SETITEMS[0]] = lambda self: self._set(self.pop_mark())
    dispatch[pickle.NEWOBJ[0]] = pickle._Unpickler.dispatch[pickle.REDUCE[0]]


def parse(data: bytes) -> Any:
    """Return the content of a pickle: plain data and Records. Raise NoDataError for a name that is
    not allowed, and any other exception if it is damaged."""
    return _Unpickler(io.BytesIO(data)).load()


def _check_plain(value: object, most: int, depth: int = 100) -> int:
    """Raise NoDataError if a value is not plain data, or has more than `most` values, which count
    each time that they occur, or is nested too deeply. Return what is left of `most`."""
    if most < 0 or depth < 0:
        raise NoDataError("it contains itself, is nested too deeply, or repeats itself too often")
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for each in value:
            most = _check_plain(each, most - 1, depth - 1)
    elif value is not None and not isinstance(value, int | float | str | bytes):
        raise NoDataError(f"it contains {value.name if isinstance(value, Record) else type(value)}")
    return most


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Context manager in which anything that is wrong with a file becomes a CheckpointError."""
    try:
        yield
    except NoDataError as error:
        text = f"cannot read {what} as plain data: {error}; save it again without objects"
        raise NoDataError(text) from None
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise CheckpointError(f"{what} is damaged: {why:.200}; load another one") from None


class Stored(io.IOBase):
    """A torch.save() file within a file, as a file. It has no readinto(), since torch would take an
    error there for a method that is not supported."""

    def __init__(self, file: OpenFile, begin: int, length: int, name: str) -> None:
        """name: of what it contains."""
        self.file, self.name, self._begin, self._length, self._at = file, name, begin, length, 0
        self.what = f"'{name}' at bytes {begin} to {begin + length} of '{file.path}'"

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def read(self, count: int) -> bytes:
        count = min(count, max(0, self._length - self._at))
        self._at += count
        return bytes(self.file.bytes_of(count, self._begin + self._at - count))

    def text(self) -> bytes:
        """Return its pickle, and return to the beginning of the file."""
        self.seek(0)
        if self.read(4) != b"PK\3\4":  # torch.load() would take it for an older format
            raise ValueError("not a zip file, as torch.save() writes since torch 1.6")
        self.seek(0)
        reader: Any = torch._C.PyTorchFileReader(cast(IO[bytes], self))
        text: bytes = reader.get_record("data.pkl")
        self.seek(0)
        return text

    def value(self) -> object:
        """Return a value that is not a tensor. Raise NoDataError if it is not plain data."""
        with reading(self.what):
            text = self.text()
            value = parse(text)
            _check_plain(value, 100_000 + 4 * len(text))
            return value


@dataclass(eq=False)
class StoredTensor:
    """A tensor in a torch.save() file."""

    stored: Stored
    dtype: torch.dtype
    shape: tuple[int, ...]
    kept: dict[StoredTensor, torch.Tensor]  # what has been read of one name, for further ranges

    @property
    def files(self) -> list[str]:
        """The name of its file."""
        return [os.path.basename(self.stored.file.path)]

    def check(self) -> None:
        """Check what the file says about the tensor. Raise CheckpointError if that is another."""
        with reading(self.stored.what):
            record = parse(self.stored.text())
            storage, _, shape, *more = record.args
            dtype = more[3] if record.name == "_rebuild_tensor_v3" else storage[1]
            if (shape, dtype) != (self.shape, self.dtype):
                raise ValueError(f"expected a tensor of shape {self.shape}, {self.dtype}")

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the tensor's bytes, in row-major order, from byte `offset` on."""
        if self not in self.kept:
            for other in [each for each in self.kept if each.stored.name != self.stored.name]:
                del self.kept[other]
            self.kept[self] = self._loaded()
        memory[:] = bytes_of(self.kept[self])[offset : offset + len(memory)]

    def _loaded(self) -> torch.Tensor:
        self.check()
        with reading(self.stored.what), torch.no_grad():
            file = cast(IO[bytes], self.stored)
            tensor: torch.Tensor = torch.load(file, "cpu", weights_only=True, mmap=False)
            return tensor.resolve_conj().resolve_neg().contiguous()
