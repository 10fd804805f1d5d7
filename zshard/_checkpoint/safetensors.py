"""Safetensors files: what they hold and where it lies; reading any range of it.

The one idea: a file is not trusted. All that its header says is checked before a byte of its data
is read: each tensor's bytes have the size of its shape and dtype, and the tensors lie one behind
the other from the first byte to the last. Names in files never become paths, but for the names of
files in an index, which must be plain. Bytes are read, not mapped: a file that another program cuts
off is then an error, not the end of the process.

The format: 8 bytes, little-endian: the length of the header. The header, JSON: {name: {"dtype": "",
"shape": [], "data_offsets": [begin, end]}}, offsets from the end of the header on. Then the data.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from zshard import _core
from zshard._checkpoint.manifest import CheckpointError, object_of

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


def rows_of(told: bytes) -> list[tuple[int, int, int]]:
    """(offset, length, CRC-32C) of what _core.File has written or checked."""
    numbers = memoryview(told).cast("Q").tolist()
    return list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))


class Span(NamedTuple):
    """A tensor in a file: `begin` is its first byte there."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def end(self) -> int:
        """The byte behind its last one."""
        return self.begin + math.prod(self.shape) * self.dtype.itemsize


class Header(NamedTuple):
    """What the header of a file says."""

    spans: dict[str, Span]
    notes: dict[str, str]  # __metadata__


class Entry(NamedTuple):
    """A tensor that can be read."""

    file: File
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def files(self) -> list[str]:
        """The name of its file."""
        return [os.path.basename(self.file.path)]

    def place(self, begin: int, numel: int) -> tuple[File, int, int]:
        """Its file, and there the first byte and the byte behind the last one of `numel` elements
        from `begin` on."""
        first = self.begin + begin * self.dtype.itemsize
        return self.file, first, first + numel * self.dtype.itemsize

    def check(self) -> None:
        """Nothing: the header has said all."""

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fills `memory`, of bytes, with the tensor's own from its byte `offset` on. Raises OSError
        or CheckpointError, naming the file."""
        self.file.read_into(memory, self.begin + offset)


class File:
    """An open file. A context: leaving it closes the file. Raises OSError for what the system
    refuses, CheckpointError for what is no regular file, or ends too early; both name it."""

    def __init__(self, path: str, follow: bool = True) -> None:
        """follow: where `path` is a link, open what it leads to; else that is an error."""
        self.path = path
        try:
            self._file = _core.File.open(path, follow)
        except OSError as error:
            if follow or error.errno != errno.ELOOP:
                raise
            raise CheckpointError(
                f"'{path}' is a link, which a checkpoint of zshard has not"
            ) from None
        except ValueError as error:
            raise CheckpointError(str(error)) from None

    @property
    def size(self) -> int:
        """Bytes that it has now."""
        return self._file.size

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """More than once is nothing."""
        with contextlib.suppress(OSError):  # of a file that was only read nothing can be lost
            self._file.close()

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fills `memory`, of bytes, with what lies in the file from byte `offset` on."""
        try:
            self._file.read([(offset, memory)])
        except ValueError as error:
            raise CheckpointError(str(error)) from None

    def bytes_of(self, count: int, offset: int = 0) -> bytearray:
        """That many bytes from byte `offset` on."""
        data = bytearray(count)
        self.read_into(memoryview(data), offset)
        return data

    def check(self, begin: int, end: int, block: int) -> list[tuple[int, int, int]]:
        """Reads that range of bytes, and keeps nothing: (offset, length, CRC-32C) of each `block`
        bytes. `begin` is a multiple of `block`."""
        try:
            return rows_of(self._file.check(begin, end, block))
        except ValueError as error:
            raise CheckpointError(str(error)) from None


class SafetensorsFile(File):
    """A safetensors file, whose header has been checked; `entries` are its tensors by name, `notes`
    the __metadata__, `data` is the first byte behind the header."""

    def __init__(self, path: str, follow: bool = True) -> None:
        super().__init__(path, follow)
        try:
            length = header_length(bytes(self.bytes_of(min(self.size, 8))), self.size, path)
            self.data = 8 + length
            spans, self.notes = parse_header(self.bytes_of(length, 8), self.size, path)
            self.entries = {name: Entry(self, *span) for name, span in spans.items()}
        except BaseException:
            self.close()
            raise

    def in_range(self, begin: int, end: int) -> list[str]:
        """What lies at these bytes: names of tensors in quotes, and "its header"."""
        there = ["its header"] if begin < self.data else []
        for name, entry in self.entries.items():
            span = Span(*entry[1:])
            if span.begin < end and begin < span.end:
                there.append(f"'{name}'")
        return there


# --- headers --------------------------------------------------------------------------------------


def header_length(first: bytes, size: int, path: str) -> int:
    """The length of the header, from the first 8 bytes of a file of `size` bytes. CheckpointError
    for one that cannot be; nothing of that length has been asked for then."""
    if size < 8:
        raise _wrong(path, f"it has {size} bytes, the length of the header alone takes 8")
    length = int.from_bytes(first, "little")
    if length > HEADER_LIMIT:
        raise _wrong(path, f"its header of {length} bytes is above the limit of {HEADER_LIMIT}")
    if length > size - 8:
        raise _wrong(path, f"it ends at byte {size}, within its header, which ends at {8 + length}")
    return length


def parse_header(text: bytes | bytearray, size: int, path: str) -> Header:
    """What a header says, of a file of `size` bytes. CheckpointError for one that is not valid."""
    header = object_of(text, f"the header of '{path}'", HEADER_LIMIT)
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(v, str) for v in notes.values()):
        raise _wrong(path, "__metadata__ in its header is no object of strings")
    data = 8 + len(text)
    spans = {name: _span(name, facts, data, path) for name, facts in header.items()}
    at = data
    for name, span in sorted(spans.items(), key=lambda item: (item[1].begin, item[1].end)):
        if span.begin != at:
            what = "overlaps another" if span.begin < at else "leaves bytes before it to no tensor"
            raise _wrong(
                path, f"tensor '{name}' begins at byte {span.begin - data} of the data and {what}"
            )
        at = span.end
    if at != size:
        raise _wrong(path, f"its tensors take {at - data} bytes, and it has {size - data} for them")
    return Header(spans, notes)


def _span(name: str, facts: Any, data: int, path: str) -> Span:
    """Where the tensor `name` lies in a file whose data begins at byte `data`."""
    if not is_name(name):
        raise _wrong(path, f"{name[:80]!r} is no name for a tensor")
    if not isinstance(facts, dict) or set(facts) != {"dtype", "shape", "data_offsets"}:
        raise _wrong(path, f"tensor '{name}' has no dtype, shape and data_offsets, or more")
    dtype, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _wrong(path, f"tensor '{name}' is of dtype {_short(dtype)!r}, which is not known")
    if not are_counts(shape) or len(shape) > _DIMS_LIMIT:
        raise _wrong(
            path,
            f"tensor '{name}' has the shape {_short(shape)}: a list of at most {_DIMS_LIMIT} "
            "numbers is one",
        )
    if not are_counts(offsets) or len(offsets) != 2:
        raise _wrong(path, f"tensor '{name}' has no [begin, end] as data_offsets")
    begin, end = offsets
    bytes_of_shape = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != bytes_of_shape or bytes_of_shape >= 2**63:
        raise _wrong(
            path,
            f"tensor '{name}' of shape {_short(shape)} and dtype {dtype} takes {bytes_of_shape} "
            f"bytes, its data_offsets are {begin} to {end}",
        )
    return Span(DTYPES[dtype], tuple(shape), data + begin)


def _wrong(path: str, what: str) -> CheckpointError:
    return CheckpointError(f"'{path}' is no valid safetensors file: {what}")


def _short(value: Any) -> str:
    return str(value)[:80]


# --- an index -------------------------------------------------------------------------------------


def parse_index(text: bytes | bytearray, path: str) -> dict[str, str]:
    """{name of a tensor: name of a file in the same folder}. CheckpointError for what is no index,
    or leads out of its folder."""
    homes = object_of(text, f"'{path}'", HEADER_LIMIT).get("weight_map")
    if not isinstance(homes, dict) or not homes:
        raise CheckpointError(f"'{path}' has no weight_map of tensors and files")
    for name, file in homes.items():
        if not isinstance(file, str) or not _is_plain(file):
            raise CheckpointError(
                f"'{path}' has the tensor {name[:80]!r} in {_short(file)!r}, which is not the "
                "name of a .safetensors file in the same folder"
            )
    return homes


def check_homes(homes: Mapping[str, str], files: Mapping[str, SafetensorsFile], index: str) -> None:
    """CheckpointError unless the files have exactly the tensors that the index at `index` says."""
    for file, opened in files.items():
        for name in opened.entries:
            if homes.get(name) != file:
                raise CheckpointError(
                    f"'{opened.path}' has the tensor '{name}', which '{index}' has elsewhere or "
                    "nowhere"
                )
    for name, file in homes.items():
        if name not in files[file].entries:
            raise CheckpointError(
                f"'{index}' has the tensor {name[:80]!r} in '{file}', which has it not"
            )


def is_name(name: str) -> bool:
    """Surrogates alone could not be printed; nothing else is asked of a name."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return 0 < len(name) <= _NAME_LIMIT and "\0" not in name


def _is_plain(name: str) -> bool:
    """Is it the name of a file, not a way to one?"""
    return is_name(name) and name.endswith(".safetensors") and not set(name) & set("/\\:")


def are_counts(values: Any) -> bool:
    """Is it a list of whole numbers from 0 on? (True is an int.)"""
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)
