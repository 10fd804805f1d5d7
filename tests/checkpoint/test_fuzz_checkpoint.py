"""What fuzz_checkpoint.py checks: of its seeds and of changes to them; and, where the fuzzer is
installed, of what it finds in a minute, with sanitizers in the core.

What is found by luck is only worth something if it would be found; so a fault that
several bytes have to be guessed for is planted, and the same fuzzer has to come upon it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sanitized
from file_calls import some_calls
from fuzz_checkpoint import TARGETS, one_input, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from zshard._core import crc32c

SEEDS = seeds()
TARGET = Path(__file__).resolve().parents[1] / "lib" / "fuzz_checkpoint.py"

needs_fuzzer = [
    pytest.mark.timeout(900),  # the first sanitized build, on a busy machine
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


def test_what_a_call_should_have_done_is_known(tmp_path, monkeypatch):
    """A core with another checksum is noticed by the first call that has one."""
    monkeypatch.setattr("file_calls.crc32c", lambda data: crc32c(data) ^ 1)
    with pytest.raises(AssertionError):
        TARGETS["calls"](some_calls()[0])


@settings(max_examples=500, deadline=None)
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
    """The variables with which the fuzzer runs over the sanitized core."""
    try:
        return {**os.environ, **sanitized.build_to_fuzz()}
    except FileNotFoundError as error:
        pytest.skip(str(error))


def fuzz(environment, script, folder, *options):
    """The fuzzer's end, in a folder of its own."""
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

    def test_finds_what_is_planted(self, environment, tmp_path):
        """The core reads behind memory of 16 bytes, where four bytes of an input are right."""
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
