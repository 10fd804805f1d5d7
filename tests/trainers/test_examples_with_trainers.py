"""The examples that need trainers: in their short form, losses and results are those of DDP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from accelerated import fork_trainers

pytest.importorskip("accelerate", reason="needs zshard[trainers]: make test-trainers")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NEEDS = {"bert": "transformers", "bert_lightning": "lightning", "lora": "trl"}
NEEDS["resnet_lightning"] = "lightning"


def quick(name: str, folder: Path, strategy: str, *flags: str) -> dict[str, Any]:
    """The JSON of an example in its short form."""
    answer = folder / f"{strategy}.json"
    given = ["--quick", "--strategy", strategy, "--json", str(answer), *flags]
    fork_trainers(EXAMPLES / f"{name}.py", *given)
    return json.loads(answer.read_text())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["full_shard", "zero2", "no_shard"])
@pytest.mark.parametrize("name", NEEDS)
def test_losses_are_those_of_ddp(name: str, strategy: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS[name])
    theirs = quick(name, tmp_path, "ddp")
    ours = quick(name, tmp_path, strategy)
    assert len(theirs["losses"][0]) >= 6
    assert ours["losses"] == theirs["losses"]
    assert (ours["value"], ours["baseline"]) == (theirs["value"], theirs["baseline"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "steps"), [("bert", [3, 4, 5]), ("lora", [3, 4, 5, 9, 10, 11])])
def test_a_run_resumes(name: str, steps: list[int], tmp_path: Path) -> None:
    """Lightning does not continue at the same batch within an epoch, so not its examples."""
    pytest.importorskip(NEEDS[name])
    saved = tmp_path / "saved"
    whole = quick(name, tmp_path, "full_shard", "--save", str(saved), "--save-every", "3")
    resumed = quick(name, tmp_path, "full_shard", "--resume", str(saved))
    assert resumed["losses"][0] == [whole["losses"][0][step] for step in steps]
    assert (resumed["first"], resumed["value"]) == (3, whole["value"])
