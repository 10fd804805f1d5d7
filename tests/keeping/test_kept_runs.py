"""`python -m zshard run --keep`: a restarted rank finds what the killed one had held; and the script of
docs/recovery.md ends with the loss of a run that nothing disturbed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from keeping import WITHOUT_TORCH, has_ended
from nursery import forked_python, python
from tasks import python_path

from zshard.extras.keeping import client
from zshard.extras.keeping.client import Keeper
from zshard.extras.run import launch

# --- options ------------------------------------------------------------------------------------------

Given = Callable[..., tuple]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Given]:
    """Return (torchrun's arguments, the token, is its keeper alive) while torchrun runs, and the
    output, for a command line."""
    runs: list = []

    def run(args: object) -> None:
        token = os.environ.get(client.VARIABLE)
        runs[:] = [args, token, token and Keeper(token).pid()]

    for name in ("OMP_NUM_THREADS", client.VARIABLE, "PET_MAX_RESTARTS"):
        monkeypatch.setenv(name, "1")  # so that it is set anew after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(launch.torchrun, "run", run)
    monkeypatch.setattr(launch, "record", lambda run: run)

    def main(*words: str) -> tuple:
        runs.clear()
        assert launch.main(["-n", "1", "--bind", "none", *words]) == 0
        return (*runs, capsys.readouterr().err)

    yield main


def test_keep_starts_a_keeper_and_ends_it(given: Given) -> None:
    args, token, pid, said = given("--keep", "train.py", "--keep", "x", "--keep=")
    assert (args.training_script, args.training_script_args) == (
        "train.py",
        ["--keep", "x", "--keep="],
    )
    assert args.max_restarts == 3
    assert f"process {pid} keeps the run's state" in said
    assert has_ended(Keeper(token))


def test_a_run_without_keep_has_none(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(client.VARIABLE, "of an outer run")
    args, token, _, said = given("train.py", "--keep")
    assert (args.max_restarts, token, args.training_script_args) == (0, None, ["--keep"])
    assert "keeps" not in said


def test_restarts_that_are_given_are_kept(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    assert given("--keep", "--max-restarts", "0", "train.py")[0].max_restarts == 0
    monkeypatch.setenv("PET_MAX_RESTARTS", "7")
    assert given("--keep", "train.py")[0].max_restarts == 7
    assert given("train.py")[0].max_restarts == 7


def test_the_keeper_ends_when_torchrun_raises(
    given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    keepers = []

    def run(args: object) -> None:
        keepers.append(Keeper(os.environ[client.VARIABLE]))
        keepers[0].hold("a", b"", [])
        raise RuntimeError("it failed")

    monkeypatch.setattr(launch.torchrun, "run", run)
    with pytest.raises(RuntimeError, match="it failed"):
        given("--keep", "train.py")
    assert has_ended(keepers[0])


def test_a_run_whose_keeper_was_ended_ends_as_usual(
    given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        launch.torchrun, "run", lambda args: Keeper(os.environ[client.VARIABLE]).end()
    )
    assert "keeps the run's state" in given("--keep", "train.py")[-1]


# --- runs ----------------------------------------------------------------------------------------------

SCRIPT = (
    f"""{WITHOUT_TORCH}
import json, os, signal, time
from zshard.extras.keeping.client import keeper_of_run
"""
    """
rank, keeper = os.environ["RANK"], keeper_of_run()
found = keeper.get(rank)
if found is None:  # the first start
    fd = os.memfd_create("shards")
    os.write(fd, f"shards of {rank}".encode())
    keeper.hold(rank, json.dumps([rank, keeper.token]).encode(), [fd])
    while len(keeper.list()) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if rank == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)
words = [os.pread(found.fds[0], 100, 0).decode(), *json.loads(found.meta), keeper.token]
words += [os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"]]
open(f"rank{rank}.json", "w").write(json.dumps(words))
"""
)


@pytest.mark.slow
def test_a_killed_rank_is_restarted_with_what_it_held(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    for name in ("TORCHELASTIC_RUN_ID", client.VARIABLE):
        env.pop(name, None)
    command = [sys.executable, "-m", "zshard", "run", "-n2", "--keep", "script.py"]
    job = subprocess.run(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    assert job.returncode == 0, job.stderr
    assert "keeps the run's state" in job.stderr
    reports = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    token = reports[0][2]
    for rank, report in enumerate(reports):
        assert report == [f"shards of {rank}", str(rank), token, token, "1", "3"]
    assert has_ended(Keeper(token))


PAGE = Path(__file__).resolve().parents[2] / "docs" / "recovery.md"


def run(script: Path, **env: str) -> tuple[str, list[str]]:
    """Return what a run said, and each rank's last loss."""
    words = ["zshard", "run", "-n2", "--bind=none", "--standalone", "--keep", script]
    done = forked_python("-m", *words, env={"PYTHON_EXEC": python(), **env}, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stderr, sorted(re.findall(r"loss of rank \d: \S+", done.stderr))


@pytest.mark.slow
def test_the_script_of_the_page_survives_a_kill(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    first = "    loss.backward()\n"
    kill = '    if step == 7 and os.environ.get("KILL") == os.environ["RANK"] + attempt:\n'
    code = code.replace(first, f"{kill}        os.kill(os.getpid(), 9)\n{first}")
    code = 'import os, sys\nattempt = os.environ["TORCHELASTIC_RESTART_COUNT"]\n' + code
    code += "said = f\"loss of rank {os.environ['RANK']}: {loss.item().hex()}\\n\"\n"
    script = tmp_path / "page.py"
    script.write_text(code + "sys.stderr.write(said)\n")
    _, expected = run(script)
    said, losses = run(script, KILL="10")
    assert "recovered step 7 from memory" in said
    assert losses == expected and len(losses) == 2
