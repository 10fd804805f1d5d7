"""What ranks conclude from each other's turns, in all worlds of a list of turns (tests/c/check_turn.c).

A check that finds nothing proves little until planted faults are found by it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from c_compile import BUILDS, NO_LOOPS, C, compile_c
from c_sources import SHM, source, sources

FAULTS = {
    "names do not count": ("memcmp(a->name, b->name, sizeof a->name) == 0", "true"),
    "numbers do not count": ("a->number == b->number && ", ""),
    "grads never count": ("if (a->kind != ZS_TURN_POST || b->kind != ZS_TURN_POST)", "if (true)"),
    "grads always count": ("        other.grads = a->fingerprint.grads;", "        (void)0;"),
    "one serves": ("if (!serves) return false;", "if (serves) return true;"),
    "no rank serves": ("if (!serves) return false;", "if (serves) return false;"),
    "all are joinable": (" && turn->joinable", ""),
    "who gave up is served": ("!all.same && all.gave_up < 0", "!all.same"),
    "the first is chosen": ("is_before(turn, &turns[chosen])", "is_before(turn, turn)"),
    "the last abandoned": ("(int r = world - 1; r >= 0; r--)", "(int r = 0; r <= world; r++)"),
    "the first is named": ("(other + 1 < world && zs_turns", "(other + 1 < 1 && zs_turns"),
    "nobody has changed": ("bool together = same ||", "bool together = true ||"),
    "who changes is not named": ("if (n++ == 0) changed = r;", "if (n++ == 0) changed = r - 1;"),
}


def build(folder: Path, turn: Path, how: str = "plain") -> Path:
    files = [C / "check_turn.c", turn, NO_LOOPS, *sources(*SHM, "turn_text.c", "arena.c")]
    return compile_c(folder / "check_turn", files, BUILDS[how])


def check(program: Path, every: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, str(every)], capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize(
    ("how", "every", "least"),
    [("sanitized", 9, 5e4), pytest.param("plain", 2, 1e6, marks=pytest.mark.thorough)],
)
def test_all_ranks_conclude_the_same(tmp_path, how, every, least):
    done = check(build(tmp_path, source("turn.c"), how), every)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[1]) > least


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(tmp_path, fault):
    text, (old, new) = source("turn.c").read_text(), FAULTS[fault]
    assert text.count(old) == 1
    (tmp_path / "turn.c").write_text(text.replace(old, new))
    done = check(build(tmp_path, tmp_path / "turn.c", "sanitized"), 9)
    assert done.returncode != 0, "not found"
