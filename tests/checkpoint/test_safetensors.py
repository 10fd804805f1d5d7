"""Untrusted safetensors files, and a fuzzer of all readers (fuzz_checkpoint.py).

Either an entire header is valid, or the error names the file. The fuzzer runs on its seeds and on
changes to them; where it is installed, it also runs for a minute with sanitizers in the core, and
finds a planted fault.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sanitized
import torch
from compare import assert_same
from file_calls import some_calls
from fuzz_checkpoint import TARGETS, one_input, seeds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rows import all_rows
from safetensors.torch import save_file
from safetensors_files import DATA, STRANGE_FILES, WRONG, packed, right_header, write

from zshard._core import crc32c
from zshard.checkpoint.checkpoint import Checkpoint
from zshard.checkpoint.safetensors import DTYPES

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


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


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_files_of_the_reference_implementation(dtype, tmp_path):
    bits = torch.randint(0, 2 if dtype == torch.bool else 100, (5, 3, dtype.itemsize)).byte()
    tensors = {
        "some": bits.view(dtype).squeeze(-1),
        "scalar": bits[0, 0].view(dtype)[0].clone(),
        "none": torch.empty(0, 4).to(dtype),
        "n\u00e4me/../with everything": bits.view(dtype)[2].clone(),
    }
    path = tmp_path / "x.safetensors"
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except (ValueError, KeyError) as error:
        pytest.skip(f"the reference implementation does not write it: {error}")
    found = read(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == dtype and found[name].shape == tensor.shape
        ours, theirs = (each.reshape(-1).view(torch.uint8) for each in (found[name], tensor))
        assert_same(ours, theirs, f"the bytes of {name}")


def test_handwritten_file(tmp_path):
    text = b"  " + json.dumps(right_header()).encode() + b"    "
    found = read(write(tmp_path / "x", packed(text)))
    assert found["a"].view(torch.uint8).reshape(-1).tolist() == list(DATA[:24])
    assert found["b"].shape == (3,) and found["b"].dtype == torch.float64
    assert read(write(tmp_path / "y", packed({}, b""))) == {}


def test_error_names_the_invalid_file_and_problem(tmp_path):
    with all_rows() as row:
        for what, (content, words) in WRONG.items():
            with row(what):
                path = write(tmp_path / "x.safetensors", content)
                with pytest.raises(ValueError) as caught:
                    read(path)
                assert words in str(caught.value) and path in str(caught.value)


def test_file_truncated_at_each_length(tmp_path):
    whole = packed(right_header())
    for length in range(len(whole)):
        path = write(tmp_path / "x.safetensors", whole[:length])
        with pytest.raises(ValueError, match=r"x\.safetensors"):
            read(path)


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


FILES = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


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


@FILES
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
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe' is not a regular file"):
        read(tmp_path / "pipe")
    with pytest.raises(ValueError, match="'/dev/null' is not a regular file"):
        read("/dev/null")
    with pytest.raises(
        FileNotFoundError, match=r"no finished checkpoint in .*: it has no zshard\.json, model\.saf"
    ):
        read(tmp_path)


# --- folders --------------------------------------------------------------------------------------


def folder(path, weight_map, files=("one", "two")):
    """A folder with an index, and files with one tensor each, of the same name."""
    path.mkdir()
    for name in files:
        save_file({name: torch.full((3,), float(len(name)))}, path / f"{name}.safetensors")
    index = {"metadata": {"total_size": 24}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(path)


HOMES = {"one": "one.safetensors", "two": "two.safetensors"}


def test_folder_with_an_index(tmp_path):
    found = read(folder(tmp_path / "x", HOMES))
    assert sorted(found) == ["one", "two"]
    save_file({"whole": torch.ones(2)}, tmp_path / "x" / "model.safetensors")
    assert sorted(read(tmp_path / "x")) == ["whole"]


def test_folder_of_links_as_in_the_hub_cache(tmp_path):
    folder(tmp_path / "blobs", HOMES)
    (tmp_path / "snapshot").mkdir()
    for each in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / each.name).symlink_to(f"../blobs/{each.name}")
    assert sorted(read(tmp_path / "snapshot")) == ["one", "two"]


@pytest.mark.parametrize("strange", STRANGE_FILES, ids=repr)
def test_index_cannot_leave_its_folder(strange, tmp_path):
    save_file({"one": torch.ones(3)}, tmp_path / "secret.safetensors")
    path = folder(tmp_path / "x", {**HOMES, "one": strange})
    with pytest.raises(ValueError, match=r"maps tensor 'one' to .* not the name of a"):
        read(path)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (b"", "is damaged: Expecting value"),
        (b"[]", "expected a JSON object"),
        (b"{}", "has no weight_map"),
        (b'{"weight_map": {}}', "has no weight_map"),
        (b'{"weight_map": [1]}', "has no weight_map"),
        (b'{"weight_map": {"one": "one.safetensors", "one": "two.safetensors"}}', "duplicate key"),
    ],
)
def test_invalid_index(index, words, tmp_path):
    path = folder(tmp_path / "x", HOMES)
    (tmp_path / "x" / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(ValueError, match=words) as caught:
        read(path)
    assert "index.json" in str(caught.value)


def test_index_that_contradicts_the_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"refers to 'two\.safetensors', which is missing"):
        read(folder(tmp_path / "a", HOMES, ["one"]))
    more = {**HOMES, "three": "two.safetensors"}
    with pytest.raises(ValueError, match=r"wrong about 'three', which 'two\.safetensors' lacks"):
        read(folder(tmp_path / "b", more))
    crossed = {"one": "two.safetensors", "two": "one.safetensors"}
    with pytest.raises(
        ValueError, match=r"wrong about 'one', which 'one\.safetensors' has, but the index"
    ):
        read(folder(tmp_path / "c", crossed))
    path = folder(tmp_path / "d", HOMES)
    (tmp_path / "d" / "two.safetensors").unlink()
    os.mkfifo(tmp_path / "d" / "two.safetensors")
    with pytest.raises(ValueError, match="is not a regular file"):
        read(path)


# --- fuzz -----------------------------------------------------------------------------------------


SEEDS = seeds()
TARGET = Path(__file__).resolve().with_name("fuzz_checkpoint.py")

needs_fuzzer = [
    pytest.mark.timeout(900),  # the first sanitized build on a busy machine
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("atheris") is None, reason="the fuzzer is not installed: atheris"
    ),
    pytest.mark.skipif(
        os.environ.get("ZSHARD_SANITIZE", "0") != "0", reason="all of this run is sanitized"
    ),
]


def test_each_target_has_seeds():
    assert {seed[0] for seed in SEEDS} == set(range(len(TARGETS)))


def test_seeds_are_errors_or_fit():
    for seed in SEEDS:
        one_input(seed)


def test_fuzzer_detects_a_wrong_result(tmp_path, monkeypatch):
    """The first call with a checksum notices a core that computes another one."""
    monkeypatch.setattr("file_calls.crc32c", lambda data: crc32c(data) ^ 1)
    with pytest.raises(AssertionError):
        TARGETS["calls"](some_calls()[0])


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_changed_seeds_are_errors_or_fit(data):
    content = bytearray(data.draw(st.sampled_from(SEEDS)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(1, len(content)))
        end = data.draw(st.integers(at, min(len(content), at + 4)))
        content[at:end] = data.draw(st.binary(max_size=4))
    one_input(bytes(content))


# --- the fuzzer -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def environment():
    """Return the variables for running the fuzzer on the sanitized core."""
    try:
        return {**os.environ, **sanitized.build_to_fuzz()}
    except FileNotFoundError as error:
        pytest.skip(str(error))


def fuzz(environment, script, folder, *options):
    """Run the fuzzer in a folder of its own; return how it ended."""
    command = [sys.executable, str(script), "-seed=1", *options]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=folder
    )


@pytest.mark.thorough  # the fuzzer takes minutes to build
class TestFuzzer:
    pytestmark = needs_fuzzer

    def test_finds_nothing_in_a_minute(self, environment, tmp_path):
        done = fuzz(environment, TARGET, tmp_path, "-max_total_time=45", str(tmp_path / "corpus"))
        assert done.returncode == 0, done.stderr[-8000:]
        assert "AddressSanitizer" not in done.stderr and "runtime error" not in done.stderr
        covered = [int(count) for count in re.findall(r" cov: (\d+) ", done.stderr)]
        assert covered[-1] > covered[0] > 100, "it hears nothing of what is covered"

    def test_fuzzer_finds_a_planted_fault(self, environment, tmp_path):
        """The core reads beyond 16 bytes of memory if four bytes of an input match."""
        script = tmp_path / "planted.py"
        script.write_text(PLANTED.format(tests=str(TARGET.parent)))
        done = fuzz(environment, script, tmp_path, "-runs=500000")
        assert done.returncode != 0
        assert "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr[-4000:]
        assert re.search(r"0 bytes (after|to the right of) 16-byte region", done.stderr)
        assert "zs_crc32c" in done.stderr
        (kept,) = tmp_path.glob("crash-*")
        assert kept.read_bytes()[1:5] == b"read"


PLANTED = """\
import ctypes, sys
sys.path.insert(0, {tests!r})
import atheris, fuzz_checkpoint
from zshard import _core

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
memory = libc.malloc(ctypes.c_size_t(16))

@atheris.instrument_func
def planted(data):
    count = 16
    if len(data) > 4 and data[0] == ord("r"):
        if data[1] == ord("e"):
            if data[2] == ord("a"):
                if data[3] == ord("d"):
                    count = 17
    _core.crc32c((ctypes.c_char * count).from_address(memory))

fuzz_checkpoint.TARGETS.clear()
fuzz_checkpoint.TARGETS["planted"] = planted
fuzz_checkpoint.main()
"""
