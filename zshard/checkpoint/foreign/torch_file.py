"""Read torch.save() files as data: plain values, and the location of a tensor's values.

Such a file is a zip archive with one uncompressed member per storage, and a pickle
that describes them. The pickle is read as data (pickled.py), and tensors directly from their place
in the file.
"""

from __future__ import annotations

import contextlib
import io
import math
import struct
import zipfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from zshard._errors import CheckpointError
from zshard.checkpoint.foreign.pickled import NotPlainError, PickledObject, parse
from zshard.checkpoint.safetensors import CODES, OpenFile

DTYPES = {str(dtype): dtype for dtype in CODES}
"""By their names in pickles."""

_STORAGES = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Short": torch.int16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
}


class NoDataError(CheckpointError):
    """A value is not plain data; nothing else is wrong."""


class Stored(NamedTuple):
    """A torch.save() file within a file."""

    file: OpenFile
    offset: int
    length: int


def are_sizes(values: Any) -> bool:
    """Return whether it is a tuple of non-negative integers."""
    return isinstance(values, tuple) and all(type(v) is int and 0 <= v < 2**63 for v in values)


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

    def tell(self) -> int:
        return self._at

    def readinto(self, memory: Any) -> int:
        count = max(0, min(len(memory), self._stored.length - self._at))
        if count:
            place = memoryview(memory).cast("B")[:count]
            self._stored.file.read_into(place, self._stored.offset + self._at)
            self._at += count
        return count


# What zipfile raises for bytes that are not an archive or are damaged, and what a pickle causes
# that does not match what torch writes. (RecursionError is a RuntimeError, for example.)
_WRONG = (zipfile.BadZipFile, EOFError, OSError, RuntimeError, OverflowError, struct.error)
_STRANGE = (ValueError, TypeError, LookupError, AttributeError)


@contextlib.contextmanager
def _reading(stored: Stored, name: str, but: type[Exception] = CheckpointError) -> Iterator[None]:
    """Context that turns any error of an archive into a CheckpointError, except for `but`."""
    try:
        yield
    except (CheckpointError, but):
        raise
    except (*_WRONG, *_STRANGE) as error:
        raise _damaged(stored, name, str(error) or type(error).__name__) from None


def _opened_zip(stored: Stored, name: str) -> zipfile.ZipFile:
    with _reading(stored, name):
        return zipfile.ZipFile(io.BufferedReader(_FileRange(stored), 4096))


def _damaged(stored: Stored, name: str, why: object) -> CheckpointError:
    return CheckpointError(
        f"'{stored.file.path}' is damaged at bytes {stored.offset} to "
        f"{stored.offset + stored.length} ('{name}'): {why}"
    )


def _member(archive: zipfile.ZipFile, end: str) -> zipfile.ZipInfo:
    """The member whose name ends with `end`. Raises KeyError if there is none."""
    for info in archive.infolist():
        if info.filename.endswith(end):
            return info
    raise KeyError(f"it has no member {end}")


def _read(archive: zipfile.ZipFile, stored: Stored, end: str) -> bytes:
    """Read a member, by the end of its name. Raise ValueError if it is compressed, which torch's
    members never are: decompressed data could have any size."""
    info = _member(archive, end)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > stored.length:
        raise ValueError(f"its member {end} is compressed, or longer than the archive")
    return archive.read(info)


def value_in(stored: Stored, name: str) -> Any:
    """Return a saved value that is not a tensor. Raise CheckpointError if it is not plain data."""
    with _opened_zip(stored, name) as archive, _reading(stored, name):
        data = _read(archive, stored, "/data.pkl")
    try:
        with _reading(stored, name, NotPlainError):
            value = parse(data)
        return _plain(value)
    except (TypeError, RecursionError, NotPlainError) as error:
        raise NoDataError(
            f"cannot read '{name}' in '{stored.file.path}' as plain data: {error}"
        ) from None


def _plain(value: Any) -> Any:
    if isinstance(value, PickledObject):
        raise TypeError(f"it contains {value!r}")
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(each) for each in value)
    return value


def values_at(
    stored: Stored, name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> tuple[int, tuple[int, ...] | None]:
    """Return the offset in the file of a tensor's first value, and its strides, in elements; None:
    the values are in row-major order."""
    with _opened_zip(stored, name) as archive, _reading(stored, name):
        told = parse(_read(archive, stored, "/data.pkl"))
        key, first, found, strides, kind = _tensor_of(told)
        info = _member(archive, f"/data/{key}")
        order = _read(archive, stored, "/byteorder").strip()
    if kind != dtype or found != shape or len(strides) != len(shape) or order != b"little":
        raise _damaged(stored, name, f"unexpected tensor: shape {found}, {kind}, strides {strides}")
    size = dtype.itemsize
    needed = (first + extent(shape, strides)) * size
    if info.compress_type != zipfile.ZIP_STORED or info.file_size < needed:
        raise _damaged(stored, name, "its values are compressed or incomplete")
    head = stored.file.bytes_of(30, stored.offset + info.header_offset)
    lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    begin = info.header_offset + 30 + lengths
    if head[:4] != b"PK\3\4" or begin + info.file_size > stored.length:
        raise _damaged(stored, name, "its values are outside the archive")
    return stored.offset + begin + first * size, None if _is_row_major(shape, strides) else strides


def extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return how many elements lie from a tensor's first to its last one in memory."""
    if math.prod(shape) == 0:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


def _tensor_of(told: Any) -> tuple[str, int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    """(name of the storage, first element there, shape, strides, dtype) of a saved tensor."""
    while isinstance(told, PickledObject) and told.name == "torch._utils._rebuild_parameter":
        told = told.args[0]
    if not isinstance(told, PickledObject) or not told.name.startswith(
        "torch._utils._rebuild_tensor_v"
    ):
        raise ValueError(f"expected a plain tensor, got {told!r}")
    storage, first, shape, strides = told.args[:4]
    tag, kind, key, *_ = storage.args[0]
    if tag != "storage" or not are_sizes((first,)) or not (are_sizes(shape) and are_sizes(strides)):
        raise ValueError("expected a plain tensor")
    if told.name.endswith("_v3"):
        dtype = DTYPES[told.args[6].name]
    else:
        dtype = _STORAGES[kind.name.removeprefix("torch.").removesuffix("Storage")]
    return str(key), first, shape, strides, dtype


def _is_row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if math.prod(shape) == 0:
        return True
    wanted = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return all(n == 1 or a == b for n, a, b in zip(shape, strides, wanted, strict=True))
