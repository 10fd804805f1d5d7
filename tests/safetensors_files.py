"""Safetensors files for tests, right and wrong ones, written by hand.

The one idea: a wrong file is a right one with one thing changed, so an error can only be about that.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

DATA = bytes(range(24)) * 2  # of the two tensors of a right file: "a" of 6 floats, "b" of 3 doubles


def right_header() -> dict[str, Any]:
    """A file's header; nothing in it is shared between calls."""
    return {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "F64", "shape": [3], "data_offsets": [24, 48]},
    }


def packed(header: Any, data: bytes = DATA) -> bytes:
    """The bytes of a file with that header: an object, or text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def changed(change: Callable[[dict[str, Any]], Any], data: bytes = DATA) -> bytes:
    """A right file after `change(header)`."""
    header = right_header()
    change(header)
    return packed(header, data)


def of_a(**facts: Any) -> bytes:
    """A right file in which the tensor "a" has other facts."""
    return changed(lambda header: header["a"].update(facts))


TWICE = b'{"a":%s,"a":%s}' % ((json.dumps(right_header()["a"]).encode(),) * 2)

# What is wrong: the bytes of the file, and words of the error.
WRONG: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "it has 0 bytes, the length of the header alone takes 8"),
    "seven bytes": (b"\1\0\0\0\0\0\0", "it has 7 bytes"),
    "header of no bytes": (packed(b""), "the header of"),
    "header beyond the file": (
        (10**6).to_bytes(8, "little") + b"{}",
        "it ends at byte 10, within its header",
    ),
    "header of 2**63": ((2**63).to_bytes(8, "little") + b"{}", "above the limit"),
    "header of 2**64-1": (b"\xff" * 8 + b"{}", "above the limit"),
    "header above 100 MB": ((100_000_001).to_bytes(8, "little") + b"{}", "above the limit"),
    "no UTF-8": (packed(b'{"\xff": 1}'), "is damaged"),
    "no JSON": (packed(b"{'a': 1}"), "is damaged"),
    "NaN": (packed(b'{"a": NaN}'), "NaN is no number that JSON has"),
    "an array": (packed([1]), "is no JSON object"),
    "a number": (packed(7), "is no JSON object"),
    "deep nesting": (packed(b'{"a":' + b"[" * 100_000), "is damaged"),
    "a number of many digits": (packed(b'{"a": ' + b"9" * 9000 + b"}"), "is damaged"),
    "a name twice": (packed(TWICE, DATA[:24]), "'a' is there twice"),
    "a fact twice": (
        packed(b'{"a":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}', b"1"),
        "'dtype' is there twice",
    ),
    "notes that are a list": (changed(lambda h: h.update(__metadata__=[])), "__metadata__"),
    "notes that are numbers": (changed(lambda h: h.update(__metadata__={"a": 1})), "__metadata__"),
    "a tensor that is a list": (changed(lambda h: h.update(a=[])), "'a' has no dtype, shape"),
    "no dtype": (changed(lambda h: h["a"].pop("dtype")), "'a' has no dtype, shape"),
    "one fact more": (of_a(order="C"), "'a' has no dtype, shape and data_offsets, or more"),
    "unknown dtype": (of_a(dtype="F31"), "'a' is of dtype 'F31', which is not known"),
    "dtype that is no text": (of_a(dtype=["F32"]), "'a' is of dtype"),
    "negative size": (of_a(shape=[-2, -3]), "'a' has the shape [-2, -3]"),
    "size that is no whole number": (of_a(shape=[2.0, 3.0]), "'a' has the shape [2.0, 3.0]"),
    "size that is a truth value": (of_a(shape=[True, 6]), "'a' has the shape"),
    "shape that is a number": (of_a(shape=6), "'a' has the shape 6"),
    "too many dimensions": (of_a(shape=[1] * 63 + [2, 3]), "at most 64 numbers"),
    "size of 2**63": (of_a(shape=[0, 2**63]), "'a' has the shape"),
    "sizes that overflow": (of_a(shape=[2**62, 2**62, 6]), "'a' of shape"),
    "another size": (of_a(shape=[2, 2]), "'a' of shape [2, 2] and dtype F32 takes 16 bytes"),
    "offsets the wrong way": (of_a(data_offsets=[24, 0]), "'a' of shape"),
    "negative offsets": (of_a(data_offsets=[-24, 0]), "no [begin, end]"),
    "three offsets": (of_a(data_offsets=[0, 24, 24]), "no [begin, end]"),
    "offsets that are floats": (of_a(data_offsets=[0.0, 24.0]), "no [begin, end]"),
    "overlap": (
        changed(lambda h: h["b"].update(data_offsets=[20, 44])),
        "'b' begins at byte 20 of the data and overlaps another",
    ),
    "a hole": (
        changed(lambda h: h["b"].update(data_offsets=[28, 52]), DATA + b"1234"),
        "'b' begins at byte 28 of the data and leaves bytes before it to no tensor",
    ),
    "a hole at the begin": (changed(lambda h: h.pop("a")), "'b' begins at byte 24"),
    "past the end": (packed(right_header(), DATA[:-1]), "its tensors take 48 bytes, and it has 47"),
    "a byte more": (
        packed(right_header(), DATA + b"1"),
        "its tensors take 48 bytes, and it has 49",
    ),
    "an empty name": (changed(lambda h: h.update({"": h.pop("a")})), "'' is no name for a tensor"),
    "NUL in a name": (changed(lambda h: h.update({"a\0": h.pop("a")})), "is no name for a tensor"),
    "half a surrogate": (changed(lambda h: h.update({"\ud800": h.pop("a")})), "is no name"),
    "a long name": (changed(lambda h: h.update({"a" * 5000: h.pop("a")})), "is no name"),
}

# Files in an index that are none of its folder.
STRANGE_FILES = [
    "../secret.safetensors",
    "/etc/passwd",
    "/tmp/other.safetensors",
    "sub/model.safetensors",
    "..\\x.safetensors",
    "c:x.safetensors",
    "model.bin",
    "",
    ".",
    "..",
    "a\0.safetensors",
    7,
    None,
    ["model.safetensors"],
]
