"""Short forms of kills.py: two kills, and six rounds of a soak: two end the processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import kills
import pytest
from nursery import python


def results_of(monkeypatch: pytest.MonkeyPatch, out: Path, *words: str) -> list[dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["kills", "--case", *words, "--quick", f"--out={out}"])
    forks = python()
    monkeypatch.setenv("PYTHON_EXEC", forks)  # of ranks
    monkeypatch.setattr(sys, "executable", forks)  # of their launcher
    assert kills.main() == 0
    return json.loads(out.read_text())["results"]


@pytest.mark.thorough
def test_faults_change_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("soak", "--minutes=9", "--rounds=6", "--life=3", "--seed=0")
    (record,) = results_of(monkeypatch, tmp_path / "soak.json", *words)
    assert (record["rounds"], record["restarts"], record["wrong"]) == (6, 2, "")
    assert {"launcher", "keeper"} <= set(record["series"])


@pytest.mark.thorough
def test_a_run_recovers_from_each_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (result,) = results_of(monkeypatch, tmp_path / "recovery.json", "recovery")
    assert all(kill["all"] > kill["without the script's own"] > 0 for kill in result["kills"])
    assert len(result["kills"]) == 2


@pytest.mark.parametrize("name", kills.LIMITS)
def test_growth_is_found(name: str) -> None:
    first = {"private": 300.0, "shared": 20.0, "descriptors": 40.0, "threads": 8.0}
    steady = [{k: value + i % 2 for k, value in first.items()} for i in range(4 * kills.LEAST)]
    growing = [{**look, name: look[name] + i} for i, look in enumerate(steady)]
    assert kills.grown(steady) == {} and [*kills.grown(growing)] == [name]
    within = [{**look, name: look[name] + (50 if i % 5 else 0)} for i, look in enumerate(steady)]
    assert kills.grown(within) == {}  # a round's resources are freed at its end
