"""The protocols of shm in all interleavings: readers (tests/c/check_reader.c), waking (check_wake.c).

A check that finds nothing proves little until planted faults are found by it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from c_compile import BUILDS, C, compile_c
from c_sources import sources

FAULTS = [
    "admits all who are in a pass",
    "admits idle ranks",
    "admits writers",
    "all are alike",
    "all hold up",
    "all lag who have looked less",
    "apart without a check",
    "backwards hold nobody up",
    "collectives complete nothing",
    "freed models hold up",
    "histories are not compared",
    "histories are told late",
    "looks of before a collective count",
    "modes do not matter",
    "no second look",
    "nobody is held up on the way to a backward",
    "nobody lags",
    "nothing clashes",
    "reading holds nobody up",
    "reductions do not count",
    "second look at counts only",
    "steps are told late",
    "versions do not matter",
    "wanting holds nobody up",
    "work does not matter",
    "writes by hand are as known ones",
    "writes wait for all backwards",
    "writes without a wait",
    "writes without the right to",
]


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("reader") / "check_reader"
    programs = [C / "check_reader.c", C / "reader_model.c"]
    return compile_c(target, [*programs, *sources("shm_word.c")], BUILDS["release"])


def check(checker: Path, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([checker, *map(str, args)], capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize(
    ("ranks", "length", "least"),
    [
        (3, 2, 4e6),
        pytest.param(2, 0, 4e7, marks=pytest.mark.thorough),
        pytest.param(3, 4, 3e7, marks=pytest.mark.thorough),
    ],
)
def test_all_interleavings_are_right(checker, ranks, length, least):
    done = check(checker, str(ranks), str(length))
    assert done.returncode == 0, done.stdout
    words = done.stdout.split()
    assert words[0] == "programs" and words[2] == "states" and int(words[3]) > least


@pytest.mark.thorough
def test_longer_programs_of_three_ranks(checker):
    done = check(checker, "3", "6")
    assert done.returncode == 0, done.stdout


@pytest.mark.sampled(8)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(checker, fault):
    done = check(checker, "2", "0", fault)
    assert done.returncode == 1 and "broken: " in done.stdout


def test_program_knows_all_faults(checker):
    """A name that is no fault's plants nothing, so each name above is one that the program knows."""
    text = (C / "reader_model.c").read_text()
    for fault in FAULTS:
        assert f'planted("{fault}")' in text


# --- waking -----------------------------------------------------------------------------------------

WAKE_FAULTS = ["no second look", "no look after handing on", "seen is read late"]


@pytest.fixture(scope="module")
def wake_checker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wake") / "check_wake"
    return compile_c(target, [C / "check_wake.c"], BUILDS["release"])


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
def test_no_rank_sleeps_forever(wake_checker, ranks, waiters, rounds, spurious, least):
    done = check(wake_checker, ranks, waiters, rounds, spurious)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split()[1]) > least


@pytest.mark.parametrize("fault", WAKE_FAULTS)
def test_planted_fault_of_waking_is_found(wake_checker, fault):
    done = check(wake_checker, "3", "3", "1", "0", fault)
    assert done.returncode == 1 and "broken: nobody wakes" in done.stdout
    assert check(wake_checker, "3", "3", "1", "0", f"not {fault}").returncode == 2
