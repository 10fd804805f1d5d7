"""Ranks' conclusions from each other's state, in all cases.

tests/c/check_reader.c runs readers over shm in all interleavings; check_turn.c compares the turns
of all worlds that a list of turns makes.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from c_compile import BUILDS, NO_LOOPS, C, compile_c
from c_sources import SHM, sources

READER = [C / "check_reader.c", C / "reader_model.c", *sources("shm_word.c")]
TURNS = [C / "check_turn.c", NO_LOOPS, *sources(*SHM, "turn.c", "turn_text.c", "arena.c")]


def count(program: Path, *args: int) -> int:
    """Return the last number that a program prints; it must find nothing."""
    command = [program, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout.split()[-1])


@pytest.mark.parametrize(
    ("ranks", "length", "least"),
    [
        (3, 2, 4e6),
        pytest.param(2, 0, 4e7, marks=pytest.mark.thorough),
        pytest.param(3, 6, 3e7, marks=pytest.mark.thorough),
    ],
)
def test_readers_are_right_in_all_interleavings(tmp_path, ranks, length, least):
    program = compile_c(tmp_path / "check_reader", READER, BUILDS["release"])
    assert count(program, ranks, length) > least


@pytest.mark.parametrize(
    ("build", "every", "least"),
    [("sanitized", 9, 5e4), pytest.param("plain", 2, 1e6, marks=pytest.mark.thorough)],
)
def test_all_ranks_conclude_the_same_from_turns(tmp_path, build, every, least):
    program = compile_c(tmp_path / "check_turn", TURNS, BUILDS[build])
    assert count(program, every) > least
