"""Each example in its short form: the losses of torch's DDP to the last bit, also after a kill.

`--quick` trains a tiny model for six steps. What full runs must reach stands in the examples, and
examples/README.md has their results.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import shutil
import signal
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from nursery import fork_ranks
from spawn import RankPool, on_ranks

import zshard

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="the examples need sklearn's digits"
)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = ["resnet", "simclr", "swav", "image_gpt", "deepspeech", "moe", "unet"]
STRATEGIES = [strategy.value for strategy in zshard.ShardingStrategy]
ENGINE = "gpt_deepspeed"  # stages of ZeRO alone; "config": that of ds_config.json, 3
STAGES = ["config", "no_shard", "zero1", "shard_grad_op"]
MINIMAL = EXAMPLES / "minimal.py"
WORLD = 2

Numbers = dict[str, Any]


def run_here(name: str, flags: list[str]) -> int | str | None:
    """Run an example on this rank and return how it exits."""
    sys.argv = [name, *flags]
    sys.path.insert(0, str(EXAMPLES))  # examples import each other by plain names
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    except SystemExit as left:
        return left.code
    finally:
        sys.path.remove(str(EXAMPLES))
    return None


def quick(pool: RankPool, name: str, folder: Path, *flags: object) -> Numbers:
    """What an example writes as JSON in its short form, on two standing ranks."""
    answer = folder / "run.json"
    given = ["--quick", "--json", str(answer), *map(str, flags)]
    assert pool.run(run_here, name, given) == [None] * pool.world
    return json.loads(answer.read_text())


@pytest.fixture(scope="module")
def known() -> dict[str, Numbers]:
    """The numbers of the examples under torch's DDP, as far as they were needed."""
    return {}


@pytest.fixture
def of_ddp(known: dict[str, Numbers], pool2: RankPool, tmp_path: Path) -> Callable[[str], Numbers]:
    def run(name: str) -> Numbers:
        if name not in known:
            known[name] = quick(pool2, name, tmp_path, "--strategy", "ddp")
        return known[name]

    return run


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "strategy"), [*product(NAMES, STRATEGIES), *product([ENGINE], STAGES)]
)
def test_losses_are_those_of_ddp(
    pool2: RankPool, of_ddp: Any, name: str, strategy: str, tmp_path: Path
) -> None:
    theirs, ours = of_ddp(name), quick(pool2, name, tmp_path, "--strategy", strategy)
    assert [len(losses) for losses in theirs["losses"]] == [6] * WORLD
    assert theirs["losses"][0] != theirs["losses"][1]  # each rank has data of its own
    assert ours["losses"] == theirs["losses"]
    assert (ours["value"], ours["baseline"]) == (theirs["value"], theirs["baseline"])


def killed_at(step: int, name: str, flags: list[str]) -> None:
    """Run an example on this rank; rank 1 is killed after a step's backward, before it is saved."""
    sys.path.insert(0, str(EXAMPLES))
    import common

    log = common.Run.log

    def log_and_die(run: Any, loss: Any) -> None:
        log(run, loss)
        if run.rank == 1 and len(run.losses) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    common.Run.log = log_and_die
    assert run_here(name, flags) is None


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "strategy"), [*product(NAMES, ["ddp", "full_shard"]), (ENGINE, "config")]
)
def test_a_killed_run_resumes(
    pool2: RankPool, of_ddp: Any, name: str, strategy: str, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    flags = ["--quick", "--strategy", strategy, "--save", str(saved), "--save-every", "1"]
    first, second = fork_ranks(killed_at, WORLD, 4, name, flags)
    assert second.returncode == -signal.SIGKILL
    assert first.returncode != 0
    resumed = quick(pool2, name, tmp_path, "--strategy", strategy, "--resume", saved)
    assert resumed["first"] == 3
    assert resumed["losses"] == [losses[3:] for losses in of_ddp(name)["losses"]]
    assert resumed["value"] == of_ddp(name)["value"]


def losses_of_minimal(*flags: str) -> list[str]:
    rank0, _ = fork_ranks(MINIMAL, WORLD, *flags, check=True)
    return [line for line in rank0.stdout.splitlines() if line.startswith("step")]


def test_the_minimal_example_has_the_losses_of_ddp_and_resumes(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    theirs = losses_of_minimal("--strategy", "ddp")
    assert len(theirs) == 10
    assert losses_of_minimal("--save", str(saved)) == theirs
    shutil.rmtree(saved / "step-00000100")  # as if the run had been killed before
    again = losses_of_minimal("--save", str(saved), "--strategy", "shard_grad_op")
    assert again == theirs[8:]


@on_ranks(2)
def test_a_result_that_is_not_reached_fails():
    reason = run_here("resnet", ["--strategy", "full_shard", "--steps", "1"])
    assert "expected better than 0.93" in reason


def test_plain_takes_one_rank(pool2: RankPool) -> None:
    reasons = pool2.run(run_here, "resnet", ["--strategy", "plain", "--quick"])
    assert all("start it without torchrun" in reason for reason in reasons)
    fork_ranks(EXAMPLES / "resnet.py", 1, "--strategy", "plain", "--quick", check=True)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*NAMES, ENGINE])
def test_each_example_draws_a_picture(pool2: RankPool, name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    quick(pool2, name, tmp_path, "--picture", tmp_path / "made.png")
    assert (tmp_path / "made.png").read_bytes().startswith(b"\x89PNG")


def test_examples_are_short_and_state_their_result() -> None:
    for name in [*NAMES, ENGINE]:
        text = (EXAMPLES / f"{name}.py").read_text()
        assert len(text.splitlines()) <= 150, name
        assert "\nEXPECTED = " in text, name
    assert len(MINIMAL.read_text().splitlines()) <= 42
