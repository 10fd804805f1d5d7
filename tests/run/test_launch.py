"""`python -m zshard run`: what it refuses, and what torchrun makes of the rest.

A launch costs seconds of torch's import, so what is refused before that is tried in
this process, and two launches show the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from spawn import _python_path

from zshard.run import launch
from zshard.run.shares import Share

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Starts `python -m ...` in tmp_path, without an OMP_NUM_THREADS of this process."""

    def start(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": _python_path(), **more}
        if "OMP_NUM_THREADS" not in more:
            env.pop("OMP_NUM_THREADS", None)
        return subprocess.run(
            [sys.executable, "-m", *words],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=env,
            timeout=200,
        )

    return start


# --- what is refused --------------------------------------------------------------------------------


@pytest.fixture
def refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., str]:
    """What is said about a command line that cannot work, in tmp_path, where train.py is."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    monkeypatch.setattr(launch.torchrun, "run", lambda args: pytest.fail("it was started"))

    def said(*words: str) -> str:
        with pytest.raises(SystemExit) as end:
            launch.main(list(words))
        assert end.value.code == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        return err

    return said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-n 0 train.py", "-n must be at least 1, got 0"),
        ("-n -2 train.py", "-n must be at least 1, got -2"),
        ("-n two train.py", "-n must be a positive number, 'auto', 'gpu' or 'cpu', got 'two'"),
        ("--bind cores train.py", "invalid choice: 'cores' (choose from"),
        ("-n 2 trian.py", "no such script: 'trian.py'"),
        ("-n 2 pkg.train", "no such script: 'pkg.train'; for a module, pass -m pkg.train"),
        ("--no-python no-such-program", "no such program: 'no-such-program'"),
        ("-m --no-python train.py", "pass one of them"),
        ("--bind core --numa-binding node train.py", "pass one of them"),
        ("--run-path train.py", "--run-path runs the script where torch is loaded already"),
        ("--frobnicate train.py", "--frobnicate"),
        ("-n 2", "the following arguments are required"),
    ],
)
def test_what_cannot_work_is_one_line(refusal: Callable[..., str], words: str, said: str) -> None:
    text = refusal(*words.split())
    assert said in text and text.startswith("python -m zshard run: error: ")


def test_gpus_where_there_are_none(refusal: Callable[..., str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there are GPUs here")
    assert "-n gpu: torch sees no such device" in refusal("-n", "gpu", "train.py")


def test_within_torchrun(refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "this process is rank 1 of a torchrun" in refusal("-n", "2", "train.py")


# --- what torchrun is given -------------------------------------------------------------------------


@pytest.fixture
def given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple]:
    """(arguments that torchrun runs with, its OMP_NUM_THREADS, what was said) of a command line."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    for name in ("TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    runs: list = []
    monkeypatch.setattr(launch.torchrun, "run", runs.append)
    monkeypatch.setattr(launch, "record", lambda run: run)

    def main(*words: str) -> tuple:
        before = dict(os.environ)
        assert launch.main(list(words)) == 0
        threads = os.environ["OMP_NUM_THREADS"]
        for name in set(os.environ) - set(before):
            del os.environ[name]
        return runs.pop(), threads, capsys.readouterr().err

    return main


def test_the_defaults(given: Callable[..., tuple]) -> None:
    args, threads, said = given("train.py", "-n", "7")
    if torch.accelerator.is_available():
        pytest.skip("with GPUs there is a rank for each")
    assert args.standalone and int(args.nproc_per_node) >= 1 and int(threads) >= 1
    assert args.training_script_args[-3:] == ["train.py", "-n", "7"]
    assert said.startswith(f"python -m zshard run: {args.nproc_per_node} rank")


def test_options_of_torchrun_pass(given: Callable[..., tuple]) -> None:
    words = "--nnodes=2 --rdzv-backend c10d --rdzv_endpoint h:1 --nproc_per_node 1 --max-restarts 3"
    args, _, _ = given(*words.split(), "train.py")
    assert not args.standalone and args.nproc_per_node == "1" and args.max_restarts == 3
    assert (args.nnodes, args.rdzv_backend, args.rdzv_endpoint) == ("2", "c10d", "h:1")


def test_torchruns_variables_set_options(
    given: Callable[..., tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("PET_NNODES", "2")
    args, _, _ = given("train.py")
    assert args.nproc_per_node == "3" and not args.standalone
    assert given("-n", "2", "train.py")[0].nproc_per_node == "2"


def test_more_ranks_than_cores_run_unbound(given: Callable[..., tuple]) -> None:
    args, threads, said = given("-n", "2000", "train.py", "x")
    assert "2000 ranks share" in said and "pass a smaller -n" in said
    assert threads == "1" and (args.training_script, args.no_python) == ("train.py", False)


def test_threads_of_the_user_win(
    given: Callable[..., tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "11")
    _, threads, said = given("-n", "1", "train.py")
    assert threads == "11" and "OMP_NUM_THREADS=11 (as the environment sets it)" in said


def test_refused_memory_policies_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> bool:
        raise PermissionError(1, "Operation not permitted")

    shares = [Share([0], 1, [0]), Share([1], 1, [1])]
    monkeypatch.setattr(launch, "has_memory_policy", refuse)
    left, note = launch.without_refused(shares)
    assert [share.nodes for share in left] == [[], []] and [each.cpus for each in left] == [
        [0],
        [1],
    ]
    assert "refuses memory policies (get_mempolicy: Operation not permitted)" in note
    monkeypatch.setattr(launch, "has_memory_policy", lambda: True)  # numactl's
    assert launch.without_refused(shares) == (left, "")
    monkeypatch.setattr(launch, "has_memory_policy", lambda: False)
    assert launch.without_refused(shares) == (shares, "")


def test_the_summary() -> None:
    shares = [Share([0, 1], 2, [0]), Share([2, 3], 2, [1])]
    line = "2 ranks, OMP_NUM_THREADS=2, on CPUs 0-1 | 2-3, memory on NUMA nodes 0 | 1"
    assert launch.summary(shares, None) == line
    many = launch.summary([Share([2 * i, 2 * i + 1], 2, []) for i in range(64)], None)
    assert many.endswith("on CPUs 0-1 | 2-3 | 4-5 | 6-7 | 8-9 | 10-11 | 12-13 | ... | 126-127")


# --- launches ---------------------------------------------------------------------------------------

REPORT = """
import json, os, sys
words = [sys.argv[1:], os.environ["OMP_NUM_THREADS"], sorted(os.sched_getaffinity(0))]
with open(f"rank{os.environ['RANK']}.json", "w") as file:
    json.dump(words, file)
"""


def test_two_ranks_see_their_shares_and_arguments(tmp_path: Path, run: Run) -> None:
    (tmp_path / "report.py").write_text(REPORT)
    words = ["--lr", "a b", "-n", "3", "--", ""]
    done = run("zshard", "run", "-n", "2", "report.py", *words)
    assert done.returncode == 0 and done.stdout == "", done.stderr
    reports = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [report[0] for report in reports] == [words, words]
    cores = [set(report[2]) for report in reports]
    if "not bound" in done.stderr:  # a single core, or a quota
        return
    assert not cores[0] & cores[1] and [len(each) for each in cores] == [
        int(report[1]) for report in reports
    ]
    assert "Setting OMP_NUM_THREADS" not in done.stderr  # torchrun's own words


def test_a_module_that_fails_on_one_rank(tmp_path: Path, run: Run) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "fails.py").write_text(
        "import os, time\nif os.environ['RANK'] == '0':\n    time.sleep(100)\nraise SystemExit(3)"
    )
    done = run("zshard", "run", "-n", "2", "-m", "pkg.fails", OMP_NUM_THREADS="1")
    assert done.returncode == 1
    assert "pkg.fails FAILED" in done.stderr and "exitcode  : 3" in done.stderr
