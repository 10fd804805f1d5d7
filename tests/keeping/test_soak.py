"""The short form of benchmarks.soak: six rounds with faults, of each kind; two rounds end the processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from nursery import python

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks/ is not installed

from benchmarks.soak import LEAST, LIMITS, grown, main  # noqa: E402
from benchmarks.soak_rank import Round  # noqa: E402


@pytest.mark.thorough
def test_faults_change_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "soak.json"
    words = ["--quick", "--minutes=9", "--rounds=6", "--life=3", "--seed=0", f"--out={out}"]
    monkeypatch.setattr(sys, "argv", ["soak", *words])
    forks = python()
    monkeypatch.setenv("PYTHON_EXEC", forks)  # of ranks
    monkeypatch.setattr(sys, "executable", forks)  # of their launcher
    assert main() == 0
    (record,) = json.loads(out.read_text())["results"]
    assert (record["rounds"], record["restarts"], record["wrong"]) == (6, 2, "")
    assert {"launcher", "keeper"} <= set(record["series"])


def looks(**growth: float) -> list[dict[str, float]]:
    """What was counted of a process in which these numbers grow by so much a look."""
    first = {"private": 300.0, "shared": 20.0, "descriptors": 40.0, "threads": 8.0}
    return [
        {name: value + i * growth.get(name, 0) + (i % 2) for name, value in first.items()}
        for i in range(4 * LEAST)
    ]


@pytest.mark.parametrize("name", LIMITS)
def test_growth_is_found(name: str) -> None:
    assert grown(looks()) == {}
    assert [*grown(looks(**{name: 1.0}))] == [name]
    assert grown(looks(**{name: 1.0})[: LEAST - 1]) == {}  # too few
    within = [{**look, name: look[name] + (50 if i % 5 else 0)} for i, look in enumerate(looks())]
    assert grown(within) == {}  # what a round has is freed at its end


def test_a_seed_gives_the_same_rounds() -> None:
    rounds = [str(Round(5, number, 4)) for number in range(20)]
    assert rounds == [str(Round(5, number, 4)) for number in range(20)]
    assert rounds != [str(Round(6, number, 4)) for number in range(20)]
    assert sum("kill" in each or "uncaught" in each for each in rounds) == 5
