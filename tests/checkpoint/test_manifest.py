"""zshard.json: what dump() writes parse() reads, and whatever else is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zshard import _core
from zshard._errors import CheckpointError
from zshard.checkpoint import manifest
from zshard.checkpoint.manifest import BLOCK, FileRecord, Manifest

_SOME = Manifest(
    id="0123456789abcdef" * 2,
    step=7,
    world=2,
    files={
        "model.safetensors": FileRecord(BLOCK + 1, (1, 0xFFFFFFFF)),
        "empty.json": FileRecord(0, ()),
    },
    tied={"head.weight": "token.weight"},
    model={"extra_state": {}},
    optimizer={"class": "AdamW", "groups": [], "state": {}},
    extra=({"a": 1}, {"a": 2.5}),
    software={"zshard": "0.1.0", "torch": "2.13.0"},
)


def signed(body):
    """The text of a manifest with this content, its checksum right."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({"crc32c": f"{_core.crc32c(text.encode()):08x}", "checkpoint": body}).encode()


def body():
    return json.loads(manifest.dump(_SOME))["checkpoint"]


def test_comes_back():
    assert manifest.parse(manifest.dump(_SOME), "x") == _SOME


def test_may_be_laid_out_anew():
    text = json.dumps(json.loads(manifest.dump(_SOME)), indent=7).encode()
    assert manifest.parse(text, "x") == _SOME


def test_extra_of_ranks():
    assert _SOME.extra_of(1) == {"a": 2.5}
    assert _SOME.extra_of(5) == {"a": 1}
    assert Manifest("0" * 32, None, 3, {}, extra=({"b": 1},)).extra_of(2) == {"b": 1}
    assert Manifest("0" * 32, None, 3, {}).extra_of(2) == {}


@pytest.mark.parametrize("cut", range(0, 1200, 37))
def test_one_that_was_cut_off(cut):
    text = manifest.dump(_SOME)
    with pytest.raises(CheckpointError, match=r"'/x/zshard\.json' is"):
        manifest.parse(text[: cut % len(text)], "/x/zshard.json")


def test_each_flipped_bit_is_found_or_says_the_same():
    """Bits of white space, say, may be of no consequence; what is said must then be the same."""
    text = manifest.dump(_SOME)
    for at in range(8 * len(text)):
        bad = bytearray(text)
        bad[at // 8] ^= 1 << at % 8
        try:
            found = manifest.parse(bytes(bad), "x")
        except CheckpointError:
            continue
        assert found == _SOME, f"bit {at}"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("version", 2, "format version 2, but this zshard reads version 1"),
        ("format", "other", "not the manifest of a zshard checkpoint"),
        ("id", "../../etc", "invalid id"),
        ("id", 5, "not a valid manifest"),
        ("step", -1, "expected a non-negative integer, got -1"),
        ("step", True, "expected a non-negative integer, got True"),
        ("world", 2.0, "expected a non-negative integer, got 2.0"),
        ("block", 4096, "unsupported block size 4096"),
        ("files", [], "not a valid manifest"),
        ("files", {"../x": {"size": 0, "crc32c": ""}}, "not the name of a file in the same folder"),
        ("files", {"a/b": {"size": 0, "crc32c": ""}}, "not the name of a file in the same folder"),
        ("files", {"zshard.json": {"size": 0, "crc32c": ""}}, "not the name of a file"),
        ("files", {"a": {"size": 1, "crc32c": ""}}, "wrong number of checksums for 'a'"),
        ("files", {"a": {"size": 2**63, "crc32c": ""}}, "expected a non-negative integer"),
        ("files", {"a": {"size": 1, "crc32c": "0000000g"}}, "not a valid manifest"),
        ("tied", {"a": 1}, "expected an object of strings"),
        ("optimizer", [], "expected an object, got"),
        ("extra", [{}, {}, {}], "extra has 3 entries for 2 ranks"),
        ("software", None, "not a valid manifest"),
        ("finite", 1, "finite must be a boolean, got 1"),
    ],
)
def test_content_that_is_wrong(key, value, said):
    with pytest.raises(CheckpointError, match=said):
        manifest.parse(signed({**body(), key: value}), "zshard.json")


@pytest.mark.parametrize("key", sorted(json.loads(manifest.dump(_SOME))["checkpoint"]))
def test_content_that_is_missing(key):
    rest = {name: value for name, value in body().items() if name != key}
    with pytest.raises(CheckpointError):
        manifest.parse(signed(rest), "zshard.json")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b"\xff\xfe",
        b'{"a": 1, "a": 1}',
        b'{"crc32c": "00000000", "checkpoint": NaN}',
        b'{"crc32c": "00000000", "checkpoint": {"format": "zshard", "version": 1, "x": 1e999}}',
        b"[" * 100_000,
        b'{"checkpoint":'
        + b'{"format": "zshard", "version": 1, "x": '
        + b"[" * 900
        + b"]" * 900
        + b"}}",
    ],
)
def test_text_that_is_no_manifest(text):
    with pytest.raises(CheckpointError, match="'x' is"):
        manifest.parse(text, "x")


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_noise(text):
    with pytest.raises(CheckpointError):
        manifest.parse(text, "x")
