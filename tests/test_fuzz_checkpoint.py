"""What fuzz_checkpoint.py checks: of its seeds and of changes to them; and, where the fuzzer is
installed, of what it finds within a minute."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_checkpoint import TARGETS, one_input, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

SEEDS = seeds()


def test_each_target_has_seeds():
    assert {seed[0] for seed in SEEDS} == set(range(len(TARGETS)))


def test_seeds_are_errors_or_fit():
    for seed in SEEDS:
        one_input(seed)


@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_changed_seeds_are_errors_or_fit(data):
    content = bytearray(data.draw(st.sampled_from(SEEDS)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(1, len(content)))
        end = data.draw(st.integers(at, min(len(content), at + 4)))
        content[at:end] = data.draw(st.binary(max_size=4))
    one_input(bytes(content))


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="the fuzzer is not installed: atheris"
)
def test_the_fuzzer_finds_nothing_within_a_minute(tmp_path):
    target = Path(__file__).with_name("fuzz_checkpoint.py")
    command = [sys.executable, str(target), "-max_total_time=60", "-seed=1", str(tmp_path / "c")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
