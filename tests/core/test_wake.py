"""Sleeping and waking over shm in all interleavings: see tests/c/check_wake.c.

As in test_reader_protocol.py, planted faults show that the check can fail.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from c_compile import BUILDS, C, compile_c

FAULTS = ["no second look", "no look after handing on", "seen is read late"]


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wake") / "check_wake"
    return compile_c(target, [C / "check_wake.c"], BUILDS["release"])


def check(checker: Path, *args: object) -> subprocess.CompletedProcess[str]:
    command = [str(checker), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize(
    ("ranks", "waiters", "rounds", "spurious", "least"),
    [
        (2, 2, 3, 2, 3e5),
        (3, 3, 1, 1, 3e5),
        (3, 1, 2, 1, 6e5),
        pytest.param(3, 3, 2, 0, 1e7, marks=pytest.mark.thorough),
        pytest.param(3, 1, 3, 1, 7e6, marks=pytest.mark.thorough),
    ],
)
def test_no_rank_sleeps_forever(checker, ranks, waiters, rounds, spurious, least):
    done = check(checker, ranks, waiters, rounds, spurious)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split()[1]) > least


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(checker, fault):
    done = check(checker, 3, 3, 1, 0, fault)
    assert done.returncode == 1 and "broken: nobody wakes" in done.stdout
    assert check(checker, 3, 3, 1, 0, f"not {fault}").returncode == 2
