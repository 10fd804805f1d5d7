"""Safetensors files for tests, valid and invalid, written by hand.

An invalid file is a valid one with one change, so an error can only be about that.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

DATA = bytes(range(24)) * 2  # the two tensors of a valid file: "a" of 6 floats, "b" of 3 doubles


def right_header() -> dict[str, Any]:
    """Return a file's header; calls share no objects."""
    return {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "F64", "shape": [3], "data_offsets": [24, 48]},
    }


def packed(header: Any, data: bytes = DATA) -> bytes:
    """Return the bytes of a file with that header: an object, or text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def changed(change: Callable[[dict[str, Any]], Any], data: bytes = DATA) -> bytes:
    """Return a valid file after `change(header)`."""
    header = right_header()
    change(header)
    return packed(header, data)


def of_a(**facts: Any) -> bytes:
    """Return a valid file in which the tensor "a" has other facts."""
    return changed(lambda header: header["a"].update(facts))


TWICE = b'{"a":%s,"a":%s}' % ((json.dumps(right_header()["a"]).encode(),) * 2)


def with_b(begin: int, data: bytes = DATA) -> bytes:
    """Return a valid file in which "b" begins elsewhere."""
    return changed(lambda header: header["b"].update(data_offsets=[begin, begin + 24]), data)


def named(name: str) -> bytes:
    """Return a valid file in which "a" has another name."""
    return changed(lambda header: header.update({name: header.pop("a")}))


def long(length: int) -> bytes:
    """Return a file whose header should have so many bytes."""
    return length.to_bytes(8, "little") + b"{}"


FACT_TWICE = b'{"a":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}'
LIMIT, FACTS = "the limit is 100000000", "'a' must have exactly dtype, shape and data_offsets"
SIZES, PLACES = "'a' must have a list of at most 64 sizes as shape, got ", "must have [begin, end]"
NAME = "is not a valid tensor name"

# Invalid files: the bytes, and text of the error.
WRONG: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "it is truncated at byte 0"),
    "seven bytes": (b"\1\0\0\0\0\0\0", "it is truncated at byte 7"),
    "header of no bytes": (packed(b""), "the header of"),
    "header beyond the file": (long(10**6), "it is truncated at byte 10"),
    "header of 2**63": (long(2**63), LIMIT),
    "header of 2**64-1": (long(2**64 - 1), LIMIT),
    "header above 100 MB": (long(100_000_001), LIMIT),
    "no UTF-8": (packed(b'{"\xff": 1}'), "is damaged"),
    "no JSON": (packed(b"{'a': 1}"), "is damaged"),
    "NaN": (packed(b'{"a": NaN}'), "NaN is not a valid JSON number"),
    "an array": (packed([1]), "expected a JSON object"),
    "a number": (packed(7), "expected a JSON object"),
    "deep nesting": (packed(b'{"a":' + b"[" * 100_000), "is damaged"),
    "a number of many digits": (packed(b'{"a": ' + b"9" * 9000 + b"}"), "is damaged"),
    "a name twice": (packed(TWICE, DATA[:24]), "duplicate key 'a'"),
    "a fact twice": (packed(FACT_TWICE, b"1"), "duplicate key 'dtype'"),
    "notes that are a list": (changed(lambda h: h.update(__metadata__=[])), "__metadata__"),
    "notes that are numbers": (changed(lambda h: h.update(__metadata__={"a": 1})), "__metadata__"),
    "a tensor that is a list": (changed(lambda h: h.update(a=[])), FACTS),
    "no dtype": (changed(lambda h: h["a"].pop("dtype")), FACTS),
    "one fact more": (of_a(order="C"), FACTS),
    "unknown dtype": (of_a(dtype="F31"), "'a' has the unknown dtype 'F31'"),
    "dtype that is no text": (of_a(dtype=["F32"]), "'a' has the unknown dtype"),
    "negative size": (of_a(shape=[-2, -3]), f"{SIZES}[-2, -3]"),
    "size that is no whole number": (of_a(shape=[2.0, 3.0]), f"{SIZES}[2.0, 3.0]"),
    "size that is a truth value": (of_a(shape=[True, 6]), SIZES),
    "shape that is a number": (of_a(shape=6), f"{SIZES}6"),
    "too many dimensions": (of_a(shape=[1] * 63 + [2, 3]), SIZES),
    "size of 2**63": (of_a(shape=[0, 2**63]), SIZES),
    "sizes that overflow": (of_a(shape=[2**62, 2**62, 6]), "'a' of shape"),
    "another size": (of_a(shape=[2, 2]), "'a' of shape [2, 2] and dtype F32 takes 16 bytes"),
    "offsets the wrong way": (of_a(data_offsets=[24, 0]), "'a' of shape"),
    "negative offsets": (of_a(data_offsets=[-24, 0]), PLACES),
    "three offsets": (of_a(data_offsets=[0, 24, 24]), PLACES),
    "offsets that are floats": (of_a(data_offsets=[0.0, 24.0]), PLACES),
    "overlap": (with_b(20), "'b' begins at byte 20 of the data and overlaps another"),
    "a hole": (with_b(28, DATA + b"1234"), "'b' begins at byte 28 of the data and leaves a gap"),
    "a hole at the begin": (changed(lambda h: h.pop("a")), "'b' begins at byte 24"),
    "past the end": (packed(right_header(), DATA[:-1]), "take 48 bytes, but its data has 47"),
    "a byte more": (packed(right_header(), DATA + b"1"), "take 48 bytes, but its data has 49"),
    "an empty name": (named(""), f"'' {NAME}"),
    "NUL in a name": (named("a\0"), NAME),
    "half a surrogate": (named("\ud800"), NAME),
    "a long name": (named("a" * 5000), NAME),
}

# Index entries that name no file of its folder.
STRANGE_FILES: list[Any] = ["../secret.safetensors", "/etc/passwd", "/tmp/other.safetensors"]
STRANGE_FILES += ["sub/model.safetensors", "..\\x.safetensors", "c:x.safetensors", "model.bin"]
STRANGE_FILES += ["", ".", "..", "a\0.safetensors", 7, None, ["model.safetensors"]]
