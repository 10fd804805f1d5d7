"""Safetensors files: what they hold and where it lies; reading any range of it.

The one idea: a file is not trusted. All that its header says is checked before a byte of its data
is read: each tensor's bytes have the size of its shape and dtype, and the tensors lie one behind
the other from the first byte to the last. Names in files never become paths, but for the names of
files in an index, which must be plain. Bytes are read, not mapped: a file that another program cuts
off is then an error, not the end of the process.

The format: 8 bytes, little-endian: the length of the header. The header, JSON: {name: {"dtype": "",
"shape": [], "data_offsets": [begin, end]}}, offsets from the end of the header on. Then the data. A
checkpoint is one such file, or a folder as Hugging Face has them.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

HEADER_LIMIT = 100_000_000  # bytes, as in the reference implementation
_NAME_LIMIT = 4096  # characters
_DIMS_LIMIT = 64
_CALL = 2**24  # bytes that are asked of the kernel at a time, so that Ctrl-C is heard
_ONE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

_DTYPES = {
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


CODES = {dtype: code for code, dtype in _DTYPES.items()}


class Entry(NamedTuple):
    """A tensor of a file: `begin` is its first byte there."""

    file: File
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


class File:
    """An open safetensors file. Raises OSError or ValueError, naming the file."""

    def __init__(self, path: str) -> None:
        self.path = path
        # A pipe would block in open() for ever; links are followed, as the Hub's folders have them.
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            facts = os.fstat(self._fd)
            if not stat.S_ISREG(facts.st_mode):
                raise ValueError(f"'{path}' is no regular file")
            self.entries = self._parse(facts.st_size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """More than once is nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fills `memory`, of bytes, with what lies in the file from byte `offset` on."""
        done = 0
        while done < len(memory):
            count = os.preadv(self._fd, [memory[done : done + _CALL]], offset + done)
            if count == 0:
                raise ValueError(
                    f"'{self.path}' ends at byte {offset + done}; it has become shorter since it "
                    "was opened"
                )
            done += count

    def _parse(self, size: int) -> dict[str, Entry]:
        if size < 8:
            raise self._wrong(f"it has {size} bytes, the length of the header alone takes 8")
        length = int.from_bytes(self._bytes(8, 0), "little")
        if length > HEADER_LIMIT:
            raise self._wrong(f"its header of {length} bytes is above the limit of {HEADER_LIMIT}")
        if length > size - 8:
            raise self._wrong(
                f"it ends at byte {size}, within its header, which ends at {8 + length}"
            )
        header = _json_object(self._bytes(length, 8), self.path, "header")
        notes = header.pop("__metadata__", {})
        if not isinstance(notes, dict) or not all(isinstance(v, str) for v in notes.values()):
            raise self._wrong("__metadata__ in its header is no object of strings")
        spans = {name: self._span(name, facts) for name, facts in header.items()}
        self._check_order({name: span[2:] for name, span in spans.items()}, size - 8 - length)
        return {
            name: Entry(self, dtype, shape, 8 + length + begin)
            for name, (dtype, shape, begin, _) in spans.items()
        }

    def _bytes(self, count: int, offset: int) -> bytearray:
        data = bytearray(count)
        self.read_into(memoryview(data), offset)
        return data

    def _span(self, name: str, facts: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
        """dtype, shape, first byte and end of the tensor `name`, in the data."""
        if not is_name(name):
            raise self._wrong(f"{name[:80]!r} is no name for a tensor")
        if not isinstance(facts, dict) or set(facts) != {"dtype", "shape", "data_offsets"}:
            raise self._wrong(f"tensor '{name}' has no dtype, shape and data_offsets, or more")
        dtype, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise self._wrong(
                f"tensor '{name}' is of dtype {str(dtype)[:80]!r}, which is not known"
            )
        if not _are_counts(shape) or len(shape) > _DIMS_LIMIT:
            raise self._wrong(
                f"tensor '{name}' has the shape {str(shape)[:80]}: a list of at most {_DIMS_LIMIT} "
                "numbers is one"
            )
        if not _are_counts(offsets) or len(offsets) != 2:
            raise self._wrong(f"tensor '{name}' has no [begin, end] as data_offsets")
        begin, end = offsets
        bytes_of_shape = math.prod(shape) * _DTYPES[dtype].itemsize
        if end - begin != bytes_of_shape or bytes_of_shape >= 2**63:
            raise self._wrong(
                f"tensor '{name}' of shape {str(shape)[:80]} and dtype {dtype} takes "
                f"{bytes_of_shape} bytes, its data_offsets are {begin} to {end}"
            )
        return _DTYPES[dtype], tuple(shape), begin, end

    def _check_order(self, spans: Mapping[str, tuple[int, ...]], size: int) -> None:
        """Raises ValueError unless the spans cover the data, of `size` bytes, once."""
        at = 0
        for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
            if begin != at:
                what = "overlaps another" if begin < at else "leaves bytes before it to no tensor"
                raise self._wrong(f"tensor '{name}' begins at byte {begin} of the data and {what}")
            at = end
        if at != size:
            raise self._wrong(f"its tensors take {at} bytes, and it has {size} for them")

    def _wrong(self, what: str) -> ValueError:
        return ValueError(f"'{self.path}' is no valid safetensors file: {what}")


class Checkpoint:
    """The tensors of a safetensors file, or of a folder with `model.safetensors` or with files and
    their `model.safetensors.index.json`. `entries` has them by name. A context: leaving it closes
    the files.

    Raises OSError for what cannot be opened, ValueError for what is not valid, naming the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._files: list[File] = []
        self.entries: dict[str, Entry] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _open(self) -> None:
        if not os.path.isdir(self.path):
            self._add(self.path)
            return
        one, index = os.path.join(self.path, _ONE), os.path.join(self.path, _INDEX)
        if os.path.exists(one):
            self._add(one)
        elif os.path.exists(index):
            self._open_indexed(index)
        else:
            raise FileNotFoundError(f"the folder '{self.path}' has neither {_ONE} nor {_INDEX}")

    def _open_indexed(self, index: str) -> None:
        homes = _read_index(index)
        for file in dict.fromkeys(homes.values()):
            path = os.path.join(self.path, file)
            if not os.path.exists(path):
                raise FileNotFoundError(f"'{index}' names '{file}', which is not there")
            for name in self._add(path):
                if homes.get(name) != file:
                    raise ValueError(
                        f"'{path}' has the tensor '{name}', which '{index}' has elsewhere or "
                        "nowhere"
                    )
        for name, file in homes.items():
            if name not in self.entries:
                raise ValueError(f"'{index}' has the tensor '{name}' in '{file}', which has it not")

    def _add(self, path: str) -> dict[str, Entry]:
        file = File(path)
        self._files.append(file)
        self.entries.update(file.entries)
        return file.entries


def _read_index(path: str) -> dict[str, str]:
    """{name of a tensor: name of a file in the same folder}"""
    with open(path, "rb") as file:
        data = file.read(HEADER_LIMIT + 1)
    if len(data) > HEADER_LIMIT:
        raise ValueError(f"'{path}' is longer than {HEADER_LIMIT} bytes")
    homes = _json_object(data, path, "file").get("weight_map")
    if not isinstance(homes, dict) or not homes:
        raise ValueError(f"'{path}' has no weight_map of tensors and files")
    for name, file in homes.items():
        if not isinstance(file, str) or not _is_plain(file):
            raise ValueError(
                f"'{path}' has the tensor '{name[:80]}' in {str(file)[:80]!r}, which is not the "
                "name of a .safetensors file in the same folder"
            )
    return homes


def _json_object(data: bytes | bytearray, path: str, what: str) -> dict[str, Any]:
    """Raises ValueError for what is no JSON object, or has a key twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in made if keys.count(key) > 1)
            raise ValueError(f"{twice[:80]!r} is there twice")
        return made

    try:
        found = json.loads(
            str(data, "utf-8"), object_pairs_hook=unique, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the {what} of '{path}' cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"the {what} of '{path}' is no JSON object")
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


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


def _are_counts(values: Any) -> bool:
    """Is it a list of whole numbers from 0 on? (True is an int.)"""
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)
