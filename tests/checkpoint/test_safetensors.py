"""Untrusted safetensors files and manifests, and a fuzzer of all readers (fuzz_checkpoint.py).

Either an entire header is valid, or the error names the file. The fuzzer runs on its seeds and on
changes to them; where it is installed, it also runs for a minute with sanitizers in the core.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import sanitized
import torch
from compare import assert_same
from fuzz_checkpoint import TARGETS, one_input, seeds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rows import all_refused, all_rows
from safetensors.torch import save_file
from safetensors_files import DATA, STRANGE_FILES, WRONG, packed, right_header, write

from zshard import CheckpointError, _core
from zshard.checkpoint.checkpoint import Checkpoint
from zshard.checkpoint.manifest import BLOCK, FileRecord, Manifest
from zshard.checkpoint.safetensors import DTYPES
from zshard.extras.per_host.parts import Spread


def values(checkpoint):
    """Return all tensors of a checkpoint."""
    found = {}
    for name, entry in checkpoint.model.items():
        data = bytearray(int(torch.Size(entry.shape).numel()) * entry.dtype.itemsize)
        entry.read_into(memoryview(data), 0)
        flat = torch.frombuffer(data, dtype=entry.dtype) if data else torch.empty(0).to(entry.dtype)
        found[name] = flat.reshape(entry.shape)
    return found


def read(path):
    with Checkpoint.opened(path) as checkpoint:
        return values(checkpoint)


def test_files_of_the_reference_implementation(tmp_path):
    for dtype in DTYPES.values():
        bits = torch.randint(0, 2 if dtype == torch.bool else 100, (5, 3, dtype.itemsize)).byte()
        tensors = {
            "some": bits.view(dtype).squeeze(-1),
            "scalar": bits[0, 0].view(dtype)[0].clone(),
            "none": torch.empty(0, 4).to(dtype),
            "n\u00e4me/../with everything": bits.view(dtype)[2].clone(),
        }
        path = tmp_path / f"{dtype}.safetensors"
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except (ValueError, KeyError):  # the reference implementation does not write it
            assert dtype not in (torch.float64, torch.bfloat16, torch.bool, torch.int64)
            continue
        found = read(path)
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype == dtype and found[name].shape == tensor.shape
            ours, theirs = (each.reshape(-1).view(torch.uint8) for each in (found[name], tensor))
            assert_same(ours, theirs, f"the bytes of {name}, {dtype}")


def test_handwritten_file(tmp_path):
    text = b"  " + json.dumps(right_header()).encode() + b"    "
    found = read(write(tmp_path / "x", packed(text)))
    assert found["a"].view(torch.uint8).reshape(-1).tolist() == list(DATA[:24])
    assert found["b"].shape == (3,) and found["b"].dtype == torch.float64
    assert read(write(tmp_path / "y", packed({}, b""))) == {}


def test_error_names_the_invalid_file_and_problem(tmp_path):
    right = packed(right_header())
    cut = {f"{length} bytes": (right[:length], "") for length in range(len(right))}
    with all_rows() as row:
        for what, (content, words) in (WRONG | cut).items():
            with row(what):
                path = write(tmp_path / "x.safetensors", content)
                with pytest.raises(ValueError) as caught:
                    read(path)
                assert words in str(caught.value) and path in str(caught.value)


def survives(content, folder):
    """Fail on anything but a ValueError that names the file, or tensors that fit the file."""
    path = write(folder / "x.safetensors", content)
    before = len(os.listdir("/proc/self/fd"))
    try:
        found = read(path)
    except ValueError as error:
        assert path in str(error)
    else:
        header = int.from_bytes(content[:8], "little")
        sizes = [tensor.numel() * tensor.element_size() for tensor in found.values()]
        assert sum(sizes) == len(content) - 8 - header
    assert len(os.listdir("/proc/self/fd")) == before


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
FACTS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F31"]) | JSON,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-1, 50), min_size=2, max_size=2) | JSON,
    }
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.dictionaries(st.text(max_size=3), FACTS | JSON, max_size=3), data=st.binary())
def test_headers_of_any_content_never_crash(tmp_path, header, data):
    survives(packed(header, data), tmp_path)


def test_file_truncated_while_open(tmp_path):
    path = write(tmp_path / "x.safetensors", packed(right_header()))
    with Checkpoint.opened(path) as checkpoint:
        os.truncate(path, os.path.getsize(path) - 3)
        with pytest.raises(ValueError, match=r"ends at byte 181, before byte 184") as caught:
            values(checkpoint)
    assert path in str(caught.value)


def test_paths_that_are_not_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    refused = {
        tmp_path / "nowhere": (FileNotFoundError, "nowhere"),
        tmp_path / "pipe": (ValueError, "pipe' is not a regular file"),
        "/dev/null": (ValueError, "'/dev/null' is not a regular file"),
        tmp_path: (FileNotFoundError, f"in '{tmp_path}': it has no zshard.json, model.saf"),
    }
    all_refused({f"{path}": (partial(read, path), *rest) for path, rest in refused.items()})


# --- folders --------------------------------------------------------------------------------------


HOMES = {"one": "one.safetensors", "two": "two.safetensors"}


def folder(path, homes=HOMES, files=HOMES, index=None):
    """A folder with an index (its bytes, or these homes), and files with one tensor each, of the same name."""
    path.mkdir()
    for name in files:
        save_file({name: torch.full((3,), float(len(name)))}, path / f"{name}.safetensors")
    text = json.dumps({"metadata": {"total_size": 24}, "weight_map": homes}).encode()
    (path / "model.safetensors.index.json").write_bytes(text if index is None else index)
    return str(path)


def test_folders_with_an_index_and_of_links_as_in_the_hub_cache(tmp_path):
    folder(tmp_path / "x")
    (tmp_path / "snapshot").mkdir()
    for each in (tmp_path / "x").iterdir():
        (tmp_path / "snapshot" / each.name).symlink_to(f"../x/{each.name}")
    for path in ("x", "snapshot"):
        assert sorted(read(tmp_path / path)) == ["one", "two"]
    save_file({"whole": torch.ones(2)}, tmp_path / "x" / "model.safetensors")
    assert sorted(read(tmp_path / "x")) == ["whole"]


INDICES = {  # the index, and the error's text
    b"": "is damaged: Expecting value",
    b"[]": "expected a JSON object",
    b"{}": "has no weight_map",
    b'{"weight_map": {}}': "has no weight_map",
    b'{"weight_map": [1]}': "has no weight_map",
    b'{"weight_map": {"one": "one.safetensors", "one": "two.safetensors"}}': "duplicate key",
}


def test_invalid_index(tmp_path):
    save_file({"one": torch.ones(3)}, tmp_path / "secret.safetensors")
    rows = {f"{index}": ({"index": index}, ValueError, said) for index, said in INDICES.items()}
    for strange in STRANGE_FILES:
        homes = {"homes": {**HOMES, "one": strange}}
        rows[repr(strange)] = homes, ValueError, "maps tensor 'one' to "
    more = {"homes": {**HOMES, "three": "two.safetensors"}}
    crossed = {"homes": {"one": "two.safetensors", "two": "one.safetensors"}}
    missing = "refers to 'two.safetensors', which is missing"
    rows |= {
        "a file is missing": ({"files": ["one"]}, FileNotFoundError, missing),
        "more": (more, ValueError, "wrong about 'three', which 'two.safetensors' lacks"),
        "crossed": (crossed, ValueError, "wrong about 'one', which 'one.safetensors' has, but the"),
    }
    table = {}
    for number, (name, (options, kind, said)) in enumerate(rows.items()):
        path = folder(tmp_path / str(number), **options)
        table[name] = partial(read, path), kind, said
        table[f"{name}: its file"] = partial(read, path), kind, "index.json"
    path = folder(tmp_path / "pipe", files=["one"])
    os.mkfifo(f"{path}/two.safetensors")
    table["a pipe"] = partial(read, path), ValueError, "is not a regular file"
    all_refused(table)


# --- manifests ------------------------------------------------------------------------------------


SOME = Manifest(
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
BODY = json.loads(SOME.dump())["checkpoint"]


def parsed(**changes):
    """Return the manifest of that content, with a valid checksum; None leaves a part out."""
    content = {key: value for key, value in {**BODY, **changes}.items() if value is not GONE}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    crc = f"{_core.crc32c(text.encode()):08x}"
    text = json.dumps({"crc32c": crc, "checkpoint": content})
    return Manifest.parse(text.encode(), "zshard.json")


GONE = object()


def test_manifest_round_trips_however_it_is_formatted():
    assert Manifest.parse(SOME.dump(), "x") == parsed() == SOME
    assert Manifest.parse(json.dumps(json.loads(SOME.dump()), indent=7).encode(), "x") == SOME


def test_extra_of_ranks():
    assert SOME.extra_of(1) == {"a": 2.5}
    assert SOME.extra_of(5) == {"a": 1}
    assert Manifest("0" * 32, None, 3, {}, extra=({"b": 1},)).extra_of(2) == {"b": 1}
    assert Manifest("0" * 32, None, 3, {}).extra_of(2) == {}


def test_flipped_bit_is_detected_or_harmless():
    """Bits of white space, for example, may not matter; the content must then be the same."""
    text = SOME.dump()
    for at in range(8 * len(text)):
        bad = bytearray(text)
        bad[at // 8] ^= 1 << at % 8
        try:
            manifest = Manifest.parse(bytes(bad), "x")
        except CheckpointError:
            continue
        assert manifest == SOME, f"bit {at}"


EMPTY = {"size": 0, "crc32c": ""}
CONTENT = [  # of a manifest, and the error's text
    ("version", 3, "format version 3, but this zshard reads versions 1 and 2"),
    ("version", 2, "invalid parts: None"),
    ("parts", {"a": {"host": "h", "rank": 0, "runs": {"b": "0+1"}}}, "invalid parts: "),
    ("format", "other", "not the manifest of a zshard checkpoint"),
    ("id", "../../etc", "invalid id"),
    ("id", 5, "not a valid manifest"),
    ("step", -1, "expected a non-negative integer, got -1"),
    ("step", True, "expected a non-negative integer, got True"),
    ("world", 2.0, "expected a non-negative integer, got 2.0"),
    ("block", 4096, "invalid block: 4096"),
    ("files", [], "not a valid manifest"),
    ("files", {"../x": EMPTY}, "not the name of a file in the same folder"),
    ("files", {"a/b": EMPTY}, "not the name of a file in the same folder"),
    ("files", {"zshard.json": EMPTY}, "not the name of a file"),
    ("files", {"a": {"size": 1, "crc32c": ""}}, "wrong number of checksums for 'a'"),
    ("files", {"a": {"size": 2**63, "crc32c": ""}}, "expected a non-negative integer"),
    ("files", {"a": {"size": 1, "crc32c": "0000000g"}}, "not a valid manifest"),
    ("tied", {"a": 1}, "expected an object of strings"),
    ("optimizer", [], "expected an object, got"),
    ("extra", [{}, {}, {}], "invalid extra: "),
    ("software", None, "not a valid manifest"),
    ("finite", 1, "invalid finite: 1"),
    *((key, GONE, "zshard.json") for key in BODY if key != "averages"),  # older ones have none
]


def test_invalid_manifest_content():
    table = {
        f"{key}: {value}": (partial(parsed, **{key: value}), said) for key, value, said in CONTENT
    }
    all_refused({name: (call, CheckpointError, said) for name, (call, said) in table.items()})


PART = {"host": "h", "rank": 0, "runs": {"b": "0+3 5+2", "c": "0+1"}}
PARTS = [  # changes of a valid manifest of part files, and the error's text
    ({"parts": {"a": {**PART, "host": 5}}}, "expected a host and a rank, got 5"),
    ({"parts": {"a": {**PART, "rank": 1.5}}}, "expected a host and a rank"),
    ({"parts": [1]}, "not a valid manifest"),
    ({"parts": {"../a": PART}}, "'../a' does not have the size of its runs"),
    ({"parts": {"x": PART}}, "'x' does not have the size of its runs"),
    ({"parts": {"a": {**PART, "runs": {"b": "0+3"}}}}, "'a' does not have the size"),
    ({"parts": {"a": {**PART, "runs": {"b": "0+-3 0+9"}}}}, "'a' exceeds 'b'"),
    ({"parts": {"a": {**PART, "runs": {"b": "-1+6"}}}}, "'a' exceeds 'b'"),
    ({"parts": {"a": {**PART, "runs": {"b": "x"}}}}, "not a valid manifest"),
    ({"whole": {"b": 6, "c": 1}}, "'a' exceeds 'b'"),
    ({"whole": {"c": 1}}, "not a valid manifest"),
    ({"whole": {"b/b": 7, "c": 1}}, "not the name of a file in the same folder"),
    ({"whole": {}}, "invalid parts: "),
]


def test_invalid_parts():
    files = {"a": {"size": 6, "crc32c": "00000000"}}
    valid = {"version": 2, "files": files, "parts": {"a": PART}, "whole": {"b": 7, "c": 1}}
    spread = lambda elsewhere=None, **changes: Spread(  # noqa: E731
        "x", parsed(**{**valid, **changes}), (), elsewhere=elsewhere
    )
    table = {f"{changes}": (partial(spread, **changes), said) for changes, said in PARTS}
    table["no file"] = spread().check, "with 8 bytes"
    table["elsewhere"] = spread(["a"]).check, "no host has 2 bytes"  # of "b"
    all_refused({name: (call, CheckpointError, said) for name, (call, said) in table.items()})


def test_text_that_is_not_a_manifest():
    head = b'{"crc32c": "00000000", "checkpoint": '
    deep = b'{"checkpoint":{"format": "zshard", "version": 1, "x": ' + b"[" * 900 + b"]" * 900
    texts = [b"", b"[]", b"{}", b"null", b"\xff\xfe", b'{"a": 1, "a": 1}', head + b"NaN}"]
    texts += [head + b'{"format": "zshard", "version": 1, "x": 1e999}}', b"[" * 100_000]
    texts += [deep + b"}}"]
    call = lambda text: partial(Manifest.parse, text, "x")  # noqa: E731
    all_refused({f"{text[:60]}": (call(text), CheckpointError, "'x' is") for text in texts})


# --- fuzz -----------------------------------------------------------------------------------------


SEEDS = seeds()


def test_seeds_are_errors_or_fit():
    assert {seed[0] for seed in SEEDS} == set(range(len(TARGETS)))
    for seed in SEEDS:
        one_input(seed)


@settings(max_examples=300)
@given(data=st.data())
def test_changed_seeds_are_errors_or_fit(data):
    content = bytearray(data.draw(st.sampled_from(SEEDS)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(1, len(content)))
        end = data.draw(st.integers(at, min(len(content), at + 4)))
        content[at:end] = data.draw(st.binary(max_size=4))
    one_input(bytes(content))


@pytest.mark.thorough  # the fuzzer takes minutes to build
@pytest.mark.slow
@pytest.mark.timeout(900)  # the first sanitized build on a busy machine
@pytest.mark.skipif(
    os.environ.get("ZSHARD_SANITIZE", "0") != "0", reason="all of this run is sanitized"
)
def test_fuzzer_finds_nothing_in_a_minute(tmp_path):
    pytest.importorskip("atheris", reason="the fuzzer is not installed: atheris")
    try:
        environment = {**os.environ, **sanitized.build_to_fuzz()}
    except FileNotFoundError as error:
        pytest.skip(str(error))
    target = Path(__file__).resolve().with_name("fuzz_checkpoint.py")
    command = [sys.executable, target, "-seed=1", "-max_total_time=45", tmp_path / "corpus"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-8000:]
    assert "AddressSanitizer" not in done.stderr and "runtime error" not in done.stderr
    covered = [int(count) for count in re.findall(r" cov: (\d+) ", done.stderr)]
    assert covered[-1] > covered[0] > 100, "it hears nothing of what is covered"
