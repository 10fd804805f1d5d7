"""Safetensors files: their tensors and offsets, and reading any range of bytes.

Files are untrusted. The whole header is checked before any data is read: each
tensor's range has the size of its shape and dtype, and the tensors fill the data section without
gaps or overlaps. Names in files never become paths, except for the file names in an index, which
must be plain. Files are read, not mapped: if another program truncates one, that is an error, not a
SIGBUS.

The format: 8 bytes, little-endian: the length of the header. The header, JSON: {name: {"dtype": "",
"shape": [], "data_offsets": [begin, end]}}, with offsets from the end of the header. Then the data.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch

from zshard import _core
from zshard._errors import CheckpointError

HEADER_LIMIT = 100_000_000  # bytes, as in the reference implementation
_NAME_LIMIT = 4096  # characters
_DIMS_LIMIT = 64

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


def rows_of(written: bytes) -> list[tuple[int, int, int]]:
    """Return (offset, length, CRC-32C) of each run that _core.File wrote or checked."""
    numbers = memoryview(written).cast("Q").tolist()
    return list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))


class Span(NamedTuple):
    """A tensor in a file; `begin` is the offset of its first byte."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def end(self) -> int:
        """The offset after its last byte."""
        return self.begin + math.prod(self.shape) * self.dtype.itemsize


class TensorEntry(NamedTuple):
    """A tensor that can be read."""

    file: OpenFile
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def files(self) -> list[str]:
        """The name of its file."""
        return [os.path.basename(self.file.path)]

    def place(self, begin: int, numel: int) -> tuple[OpenFile, int, int]:
        """Return (file, first byte, byte after the last) of `numel` elements from `begin` on."""
        first = self.begin + begin * self.dtype.itemsize
        return self.file, first, first + numel * self.dtype.itemsize

    def check(self) -> None:
        """Do nothing: the header has been checked."""

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the tensor's bytes from byte `offset` on. Raise OSError or
        CheckpointError, naming the file."""
        self.file.read_into(memory, self.begin + offset)


class ReadableBytes(Protocol):
    """Bytes that can be read, as from a _core.File."""

    @property
    def size(self) -> int: ...

    def read(self, ranges: list[tuple[int, memoryview]], /) -> None: ...

    def close(self) -> None: ...


class OpenFile:
    """An open file, also as a context manager. Raises OSError if the system refuses, and
    CheckpointError if it is not a regular file or is truncated; both name the file."""

    def __init__(self, path: str, follow: bool = True, source: ReadableBytes | None = None) -> None:
        """follow: follow a symbolic link; otherwise a link is an error.
        source: where its bytes are, if not in a file at `path`."""
        self.path = path
        try:
            self._file: ReadableBytes | _core.File = source or _core.File.open(path, follow)
        except OSError as error:
            if follow or error.errno != errno.ELOOP:
                raise
            text = f"'{path}' is a symbolic link, which a zshard checkpoint must not contain"
            raise CheckpointError(text) from None
        except ValueError as error:
            raise CheckpointError(str(error)) from None

    @property
    def size(self) -> int:
        """Its current size in bytes."""
        return self._file.size

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Further calls do nothing."""
        with contextlib.suppress(OSError):  # a file that was only read cannot lose data
            self._file.close()

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the bytes of the file from byte `offset` on."""
        try:
            self._file.read([(offset, memory)])
        except ValueError as error:
            raise CheckpointError(str(error)) from None

    def bytes_of(self, count: int, offset: int = 0) -> bytearray:
        """Return `count` bytes from byte `offset` on."""
        data = bytearray(count)
        self.read_into(memoryview(data), offset)
        return data

    def check(self, begin: int, end: int, block: int) -> list[tuple[int, int, int]]:
        """Read a range of bytes and return only (offset, length, CRC-32C) of each `block` bytes.
        `begin` is a multiple of `block`."""
        assert isinstance(self._file, _core.File), "only files on disk have checksums"
        try:
            return rows_of(self._file.check(begin, end, block))
        except ValueError as error:
            raise CheckpointError(str(error)) from None

    def in_range(self, begin: int, end: int) -> list[str]:
        """Return what these bytes contain, as far as it is known: tensor names in quotes, and "the
        header"."""
        return []


class SafetensorsFile(OpenFile):
    """A safetensors file whose header has been checked. `entries` has its tensors by name, `notes`
    the __metadata__; `data` is the offset of the data section."""

    def __init__(self, path: str, follow: bool = True, source: ReadableBytes | None = None) -> None:
        super().__init__(path, follow, source)
        try:
            length = header_length(bytes(self.bytes_of(min(self.size, 8))), self.size, path)
            self.data = 8 + length
            spans, self.notes = parse_header(self.bytes_of(length, 8), self.size, path)
            self.entries = {name: TensorEntry(self, *span) for name, span in spans.items()}
        except BaseException:
            self.close()
            raise

    def note(self, name: str) -> dict[str, Any]:
        """Return a JSON object that is in the notes; {} if it is not there."""
        text = self.notes.get(name, "{}").encode(errors="surrogatepass")
        return object_of(text, f"the header of '{self.path}'")

    def in_range(self, begin: int, end: int) -> list[str]:
        spans = {f"'{name}'": Span(*entry[1:]) for name, entry in self.entries.items()}
        inside = (name for name, span in spans.items() if span.begin < end and begin < span.end)
        return [*(["the header"] if begin < self.data else []), *inside]


# --- headers --------------------------------------------------------------------------------------


def header_length(first: bytes, size: int, path: str) -> int:
    """Return the length of the header, from the first 8 bytes of a file of `size` bytes. Raise
    CheckpointError for an impossible length, before any memory of that size is allocated."""
    length = int.from_bytes(first, "little")
    what = f"its header has {length} bytes; the limit is {HEADER_LIMIT}"
    if length <= HEADER_LIMIT:
        what = f"it is truncated at byte {size}; its header ends at {8 + length}"
    if size < 8 or length > min(HEADER_LIMIT, size - 8):
        raise CheckpointError(f"'{path}' is not a valid safetensors file: {what}")
    return length


def parse_header(
    text: bytes | bytearray, size: int, path: str
) -> tuple[dict[str, Span], dict[str, str]]:
    """Return the tensors and the __metadata__ in the header of a file of `size` bytes. Raise
    CheckpointError if it is invalid."""
    header = object_of(text, f"the header of '{path}'")
    notes = header.pop("__metadata__", {})
    data = at = 8 + len(text)
    try:
        if not isinstance(notes, dict) or not all(isinstance(v, str) for v in notes.values()):
            raise ValueError("__metadata__ in its header must be an object of strings")
        spans = {name: _span(name, facts, data) for name, facts in header.items()}
        for name, span in sorted(spans.items(), key=lambda item: (item[1].begin, item[1].end)):
            if span.begin != at:
                what = "overlaps another" if span.begin < at else "leaves a gap before it"
                place = f"byte {span.begin - data} of the data"
                raise ValueError(f"tensor '{name}' begins at {place} and {what}")
            at = span.end
        if at != size:
            raise ValueError(f"its tensors take {at - data} bytes, but its data has {size - data}")
    except ValueError as error:
        raise CheckpointError(f"'{path}' is not a valid safetensors file: {error}") from None
    return spans, notes


def _span(name: str, facts: object, data: int) -> Span:
    """Return where a tensor is in a file whose data section begins at byte `data`. Raise ValueError
    if the header's facts are invalid."""
    if not is_name(name):
        raise ValueError(f"{name[:80]!r} is not a valid tensor name")
    if not isinstance(facts, dict) or set(facts) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor '{name}' must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"tensor '{name}' has the unknown dtype {_short(dtype)!r}")
    if not are_counts(shape) or len(shape) > _DIMS_LIMIT:
        sizes = f"a list of at most {_DIMS_LIMIT} sizes as shape"
        raise ValueError(f"tensor '{name}' must have {sizes}, got {_short(shape)}")
    if not are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor '{name}' must have [begin, end] as data_offsets")
    begin, end = offsets
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != size or size >= 2**63:
        takes = f"of shape {_short(shape)} and dtype {dtype} takes {size} bytes"
        raise ValueError(f"tensor '{name}' {takes}, but its data_offsets are {begin} to {end}")
    return Span(DTYPES[dtype], tuple(shape), data + begin)


def _short(value: object) -> str:
    return str(value)[:80]


# --- an index -------------------------------------------------------------------------------------


def parse_index(text: bytes | bytearray, path: str) -> dict[str, str]:
    """Parse an index: {tensor name: name of a file in the same folder}. Raise CheckpointError if it
    is invalid or a file name leads out of the folder."""
    homes = object_of(text, f"'{path}'").get("weight_map")
    if not isinstance(homes, dict) or not homes:
        raise CheckpointError(f"'{path}' has no weight_map from tensors to files")
    for name, file in homes.items():
        is_plain = isinstance(file, str) and is_name(file) and not set(file) & set("/\\:")
        if not is_plain or not file.endswith(".safetensors"):
            what = f"'{path}' maps tensor {name[:80]!r} to {_short(file)!r}"
            raise CheckpointError(f"{what}, not the name of a .safetensors file in the same folder")
    return homes


def check_homes(homes: Mapping[str, str], files: Mapping[str, SafetensorsFile], index: str) -> None:
    """Raise CheckpointError unless the files have exactly the tensors that `index` maps to them."""
    pairs = {(name, file) for file, opened in files.items() for name in opened.entries}
    for name, file in sorted(pairs ^ set(homes.items())):
        what = "has, but the index does not list there" if (name, file) in pairs else "lacks"
        raise CheckpointError(f"'{index}' is wrong about {name[:80]!r}, which '{file}' {what}")


def is_name(name: str) -> bool:
    """Return whether a tensor may have this name: not empty, not too long, no NUL, printable (no
    lone surrogates), and not the one that means something else in a header."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return 0 < len(name) <= _NAME_LIMIT and "\0" not in name and name != "__metadata__"


def are_counts(values: object) -> TypeGuard[list[int]]:
    """Return whether it is a list of non-negative integers. (True is an int.)"""
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)


# --- JSON -----------------------------------------------------------------------------------------


def object_of(text: bytes | bytearray, what: str, limit: int = HEADER_LIMIT) -> dict[str, Any]:
    """Parse a JSON object: UTF-8, at most `limit` bytes, no duplicate keys, no NaN or infinity.
    Raise CheckpointError, which names `what`, for anything else."""
    if len(text) > limit:
        raise CheckpointError(f"{what} is longer than {limit} bytes")
    try:
        decoded = str(text, "utf-8")
        value = json.loads(
            decoded, object_pairs_hook=_unique, parse_float=_number, parse_constant=_number
        )
        if not isinstance(value, dict):
            raise ValueError("expected a JSON object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is damaged: {error}") from None
    return value


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is not a valid JSON number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"duplicate key {twice[:80]!r}")
    return unique
