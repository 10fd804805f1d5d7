"""`python -m zshard run`: torchrun's arguments, and a rank's state before its program starts.

A launch costs seconds of torch's import, so decisions before it are tested in this process, the
command of a rank without torchrun, and two launches test the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from rows import all_rows
from tasks import python_path

from zshard import KeeperError
from zshard.extras.keeping import client
from zshard.extras.keeping.client import Keeper
from zshard.extras.run import launch, rank
from zshard.extras.run.cores import Share

Done = subprocess.CompletedProcess[str]

# --- refusals ---------------------------------------------------------------------------------------


REFUSED = {  # options, and the message
    "-n 0 train.py": "-n must be at least 1, got 0",
    "-n two train.py": "-n must be a number, 'auto', 'gpu' or 'cpu': Unsupported",
    "--bind cores train.py": "invalid choice: 'cores' (choose from",
    "-m --no-python train.py": "pass one of them",
    "--bind core --numa-binding node train.py": "pass one of them",
    "--frobnicate train.py": "--frobnicate",
    "-n 2": "the following arguments are required",
}


def test_invalid_options_are_refused_early(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch.torchrun, "run", lambda args: pytest.fail("it was started"))
    with all_rows() as row:
        for words, text in REFUSED.items():
            with row(words):
                with pytest.raises(SystemExit) as end:
                    launch.main(words.split())
                assert end.value.code == 2 and text in capsys.readouterr().err


# --- torchrun's arguments ---------------------------------------------------------------------------


@pytest.fixture
def given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple]:
    """Return (torchrun's arguments, its OMP_NUM_THREADS, the output) for a command line.

    The arguments have the token as well, and the process of the run's keeper, if it answers."""
    for name in ("TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS", client.VARIABLE, "PET_MAX_RESTARTS"):
        monkeypatch.delenv(name, raising=False)
    runs: list = []

    def run(args: argparse.Namespace) -> None:
        args.token = os.environ.get(client.VARIABLE)
        args.own_stores = os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1"
        args.keeper = args.token and Keeper(args.token).pid()
        runs.append(args)

    monkeypatch.setattr(launch.torchrun, "run", run)
    monkeypatch.setattr(launch, "record", lambda run: run)

    def main(*words: str) -> tuple:
        before = dict(os.environ)
        try:
            assert launch.main(list(words)) == 0
            threads = os.environ["OMP_NUM_THREADS"]
        finally:
            for name in set(os.environ) - set(before):
                del os.environ[name]
        return runs.pop() if runs else None, threads, capsys.readouterr().err

    return main


def test_defaults(given: Callable[..., tuple]) -> None:
    if torch.accelerator.is_available():
        pytest.skip("with GPUs there is a rank for each")
    args, threads, said = given("train.py", "-n", "7")
    assert int(args.nproc_per_node) >= 1 and int(threads) >= 1
    assert args.training_script_args[-3:] == ["train.py", "-n", "7"]
    assert said.startswith(f"python -m zshard run: {args.nproc_per_node} rank")


def test_torchrun_options_pass_through(given: Callable[..., tuple]) -> None:
    words = "--nnodes=2 --rdzv-backend c10d --rdzv_endpoint h:1 --nproc_per_node 1 --max-restarts 3"
    args, _, _ = given(*words.split(), "train.py")
    assert args.nproc_per_node == "1" and args.max_restarts == 3
    assert (args.nnodes, args.rdzv_backend, args.rdzv_endpoint) == ("2", "c10d", "h:1")


def test_restarts_have_a_store_of_their_own(given: Callable[..., tuple]) -> None:
    """In torch 2.13, ranks that share a store with the attempt before may hang in their own
    init_process_group()."""
    for words, own in {"": False, "--max-restarts 2": True, "--keep": True}.items():
        args, _, _ = given("-n1", "--bind=none", *words.split(), "train.py")
        assert (args.own_stores, args.standalone) == (own, own), words
    args, _, _ = given("-n1", "--max-restarts", "1", "--master-port", "29533", "train.py")
    assert (args.own_stores, args.standalone, args.master_port) == (True, False, 29533)
    several = "--max-restarts 1 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:1 -n1 train.py"
    args, _, _ = given(*several.split())
    assert args.own_stores and not args.standalone


def test_variables_set_options_and_threads(
    given: Callable[..., tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "11")
    args, threads, said = given("train.py")
    assert args.nproc_per_node == "3"
    assert threads == "11" and "OMP_NUM_THREADS=11" in said
    assert given("-n", "2", "train.py")[0].nproc_per_node == "2"


def test_more_ranks_than_cores_run_unbound(given: Callable[..., tuple]) -> None:
    args, threads, said = given("-n", "2000", "train.py", "x")
    assert "2000 ranks share" in said and "pass a smaller -n" in said
    assert threads == "1" and (args.training_script, args.no_python) == ("train.py", False)


def test_summary() -> None:
    shares = [Share([0, 1], [0]), Share([2, 3], [1])]
    line = "2 ranks, OMP_NUM_THREADS=2, on CPUs 0-1 | 2-3, memory on NUMA nodes 0 | 1"
    assert launch.summary(shares, "2") == line
    assert launch.summary([Share([], [])], "4") == "1 rank, OMP_NUM_THREADS=4, not bound to cores"


# --- a keeper ---------------------------------------------------------------------------------------


def has_ended(token: str) -> bool:
    with pytest.raises(KeeperError, match="no keeper answers"):
        Keeper(token).list()
    return True


def test_keep_starts_a_keeper_and_ends_it(
    given: Callable[..., tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    args, _, said = given("-n1", "--bind=none", "--keep", "train.py", "--keep", "x", "--keep=")
    assert args.training_script == "train.py" and args.max_restarts == 3
    assert args.training_script_args[-3:] == ["--keep", "x", "--keep="]
    assert f"process {args.keeper} keeps the run's state" in said
    assert has_ended(args.token)
    assert given("-n1", "--keep", "--max-restarts", "0", "train.py")[0].max_restarts == 0
    monkeypatch.setenv("PET_MAX_RESTARTS", "7")
    assert given("-n1", "--keep", "train.py")[0].max_restarts == 7
    assert given("-n1", "train.py")[0].max_restarts == 7


def test_a_run_without_keep_has_none(
    given: Callable[..., tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(client.VARIABLE, "of an outer run")
    args, _, said = given("-n1", "train.py", "--keep")
    assert (args.max_restarts, args.token) == (0, None) and "keeps" not in said
    assert args.training_script_args[-1:] == ["--keep"]


@pytest.mark.parametrize("ends", ["torchrun", "the keeper"])
def test_a_run_that_fails_or_whose_keeper_was_ended(
    given: Callable[..., tuple], monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """The keeper of a failed run ends; a run without its keeper ends as usual."""
    tokens = []

    def run(args: object) -> None:
        tokens.append(os.environ[client.VARIABLE])
        if ends == "the keeper":
            return Keeper(tokens[0]).end()
        Keeper(tokens[0]).hold("a", b"", [])
        raise RuntimeError("it failed")

    monkeypatch.setattr(launch.torchrun, "run", run)
    with pytest.raises(RuntimeError, match="it failed") if ends == "torchrun" else nullcontext():
        assert "keeps the run's state" in given("-n1", "--keep", "train.py")[-1]
    assert has_ended(tokens[0])


# --- a rank, without torchrun -----------------------------------------------------------------------

REPORT = """
import json, os, signal, sys
print(json.dumps([sys.argv[1:], sorted(os.sched_getaffinity(0)), __name__,
    sys.orig_argv[1:-len(sys.argv[1:]) or None], sys.path[0], "ZSHARD_RUN" in os.environ]))
"""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Run a rank's command in tmp_path, where "a script.py" reports."""
    (tmp_path / "a script.py").write_text(REPORT)

    def start(*words: str, shares: tuple = (Share([0], []),), of: int = 0, **how: bool) -> Done:
        options = {"no_python": False, "module": False, "run_path": False, **how}
        args = argparse.Namespace(
            training_script=words[0], training_script_args=list(words[1:]), **options
        )
        monkeypatch.setenv("LOCAL_RANK", str(of))
        monkeypatch.setenv(rank.VARIABLE, "")
        launch.bind(args, list(shares))
        command = [args.training_script, *args.training_script_args]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)

    return start


def test_script_gets_its_share_and_its_arguments(
    started: Callable[..., Done], tmp_path: Path
) -> None:
    last = max(os.sched_getaffinity(0))
    words = ["--lr", "a b", "--", "-m", "", "$HOME 'x'"]
    done = started("a script.py", *words, shares=(Share([0], []), Share([last], [0])), of=1)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report[:3] == [words, [last], "__main__"]
    assert report[3] == ["-u", "a script.py"]  # looks like a direct start
    assert Path(report[4]) == tmp_path or report[4] == ""
    assert report[5] is False


def test_module_and_a_program(started: Callable[..., Done], tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(REPORT)
    report = json.loads(started("pkg", "-x", module=True).stdout)
    assert report[0] == ["-x"] and report[2:4] == ["__main__", ["-u", "-m", "pkg"]]
    done = started("sh", "-c", 'echo "$1"; kill -PIPE $$', "sh", "a  b", no_python=True)
    assert done.stdout == "a  b\n" and done.returncode == -13  # only Python ignores SIGPIPE


def test_exit_statuses_and_tracebacks_are_the_programs(
    started: Callable[..., Done], tmp_path: Path
) -> None:
    (tmp_path / "exits.py").write_text("raise SystemExit(42)")
    assert started("exits.py").returncode == 42
    (tmp_path / "fails.py").write_text("def f():\n    raise ValueError('no')\nf()")
    lines = started("fails.py").stderr.splitlines()
    assert lines[0].startswith("Traceback") and 'fails.py", line 3, in <module>' in lines[1]
    done = started("no-such-program", no_python=True)
    words = "python -m zshard run: cannot start 'no-such-program': No such file or directory"
    assert done.returncode == 1 and done.stderr.strip() == words


def test_modules_in_the_working_directory_do_not_shadow(
    started: Callable[..., Done], tmp_path: Path
) -> None:
    for name in ("rank", "signal", "contextlib", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    assert started("echo", "started", no_python=True).stdout == "started\n"


def policy_after(*placed: list[int]) -> list[str]:
    """Return the memory policies of a process after each call of place_memory()."""
    code = f"""
import sys; sys.path.insert(0, {str(Path(rank.__file__).parent)!r})
import rank
for nodes in {list(placed)}:
    rank.place_memory(nodes)
    print(open("/proc/self/numa_maps").readline().split()[1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_memory_is_on_the_node_and_a_policy_is_kept() -> None:
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("the kernel has no NUMA nodes")
    if policy_after([0]) == ["default"]:
        pytest.skip("the kernel or the container refuses memory policies")
    assert policy_after([0], [0, 64]) == ["prefer:0", "prefer:0"]


def test_unknown_machine_has_no_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "x", "6", "v", "vax")))
    rank.place_memory([0])


# --- launches ---------------------------------------------------------------------------------------


def test_two_ranks_see_their_shares_and_arguments(tmp_path: Path) -> None:
    (tmp_path / "report.py").write_text(
        "import json, os, sys\n"
        "words = [sys.argv[1:], os.environ['OMP_NUM_THREADS'], sorted(os.sched_getaffinity(0))]\n"
        "open(f'rank{os.environ[\"RANK\"]}.json', 'w').write(json.dumps(words))\n"
    )
    words = ["--lr", "a b", "-n", "3", "--", ""]
    env = {**os.environ, "PYTHONPATH": python_path()}
    env.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, "-m", "zshard", "run", "-n", "2", "report.py", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=200
    )
    assert done.returncode == 0 and done.stdout == "", done.stderr
    reports = [json.loads((tmp_path / f"rank{of}.json").read_text()) for of in range(2)]
    assert [report[0] for report in reports] == [words, words]
    cores = [set(report[2]) for report in reports]
    if "not bound" in done.stderr:  # a single core, or a quota
        return
    assert not cores[0] & cores[1]
    assert [len(each) for each in cores] == [int(report[1]) for report in reports]
    assert "Setting OMP_NUM_THREADS" not in done.stderr  # torchrun's message
