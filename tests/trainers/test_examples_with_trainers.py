"""The examples that need trainers: in their short form, losses and results are those of DDP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nursery import fork_ranks

pytest.importorskip("accelerate", reason="needs zshard[trainers]: make test-trainers")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NEEDS = {"bert": "transformers", "bert_lightning": "lightning", "lora": "trl"}


def quick(name: str, folder: Path, strategy: str, *flags: str) -> dict[str, Any]:
    """What an example writes as JSON in its short form."""
    answer = folder / f"{strategy}.json"
    given = ["--quick", "--strategy", strategy, "--json", str(answer), *flags]
    fork_ranks(EXAMPLES / f"{name}.py", 2, *given, check=True, timeout=240)
    return json.loads(answer.read_text())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", ["full_shard", "zero2", "no_shard"])
@pytest.mark.parametrize("name", NEEDS)
def test_losses_are_those_of_ddp(name: str, strategy: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS[name])
    theirs = quick(name, tmp_path, "ddp")
    ours = quick(name, tmp_path, strategy)
    assert len(theirs["losses"][0]) >= 6
    assert ours["losses"] == theirs["losses"]
    assert (ours["value"], ours["baseline"]) == (theirs["value"], theirs["baseline"])


@pytest.mark.parametrize("name", ["bert", "bert_lightning"])
def test_a_stopped_run_resumes(name: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS[name])
    saved = str(tmp_path / "saved")
    whole = quick(name, tmp_path, "full_shard", "--save", saved, "--save-every", "3")
    last = sorted(Path(saved).iterdir(), key=lambda path: path.stat().st_mtime)[-1]
    last.rename(tmp_path / "last")  # as if the run had been stopped before
    resumed = quick(name, tmp_path, "full_shard", "--resume", saved)
    assert resumed["losses"][0] == whole["losses"][0][3:]
