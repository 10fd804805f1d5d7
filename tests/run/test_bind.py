"""What a rank is before its program starts: bound, with its threads and memory, and else untouched.

The command that torchrun would start is started here without torchrun, in
milliseconds. What the kernel is asked of memory is recorded: this machine may have one node only.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zshard.run import bind
from zshard.run.launch import command
from zshard.run.shares import Share

REPORT = """
import json, os, signal, sys
print(json.dumps([sys.argv[1:], os.environ.get("OMP_NUM_THREADS"), sorted(os.sched_getaffinity(0)),
    __name__, sys.orig_argv[1:-len(sys.argv[1:]) or None], sys.path[0]]))
"""


def started(
    tmp_path: Path,
    shares: list[Share],
    *words: str,
    rank: int = 0,
    threads: str | None = None,
    **how,
) -> subprocess.CompletedProcess[str]:
    """What the command for a rank does; how: no_python, module."""
    options = {"no_python": False, "module": False, **how}
    args = argparse.Namespace(
        training_script=words[0], training_script_args=list(words[1:]), **options
    )
    program, given = command(args, shares, threads)
    given = [each.replace("${local_rank}", str(rank)) for each in given]  # as torchrun does
    return subprocess.run(
        [program, *given],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "5"},
    )


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "a script.py").write_text(REPORT)
    return "a script.py"


def test_a_script_gets_its_share_and_its_arguments(tmp_path: Path, script: str) -> None:
    last = max(os.sched_getaffinity(0))
    words = ["--lr", "a b", "--", "-m", "", "$HOME 'x'"]
    shares = [Share([], 1, []), Share([last], 7, [])]
    done = started(tmp_path, shares, script, *words, rank=1)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report[:4] == [words, "7", [last], "__main__"]
    assert report[4] == ["-u", script]  # nothing tells that it was started in another way
    assert Path(report[5]) == tmp_path or report[5] == ""


def test_the_users_threads_are_kept(tmp_path: Path, script: str) -> None:
    done = started(tmp_path, [Share([0], 7, [])], script, "x", threads="5")
    assert json.loads(done.stdout)[1] == "5"


def test_a_module_and_a_program(tmp_path: Path, script: str) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(REPORT)
    report = json.loads(started(tmp_path, [Share([], 3, [])], "pkg", "-x", module=True).stdout)
    assert report[:2] == [["-x"], "3"] and report[3:5] == ["__main__", ["-u", "-m", "pkg"]]
    shell = 'echo "$OMP_NUM_THREADS $1"; kill -PIPE $$'
    words = ["sh", "-c", shell, "sh", "a  b"]
    done = started(tmp_path, [Share([], 3, [])], *words, no_python=True)
    assert done.stdout == "3 a  b\n" and done.returncode == -13  # Python alone ignores SIGPIPE


def test_exit_statuses_and_tracebacks_are_the_programs(tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text("raise SystemExit(42)")
    assert started(tmp_path, [Share([], 1, [])], "exits.py").returncode == 42
    (tmp_path / "fails.py").write_text("def f():\n    raise ValueError('no')\nf()")
    lines = started(tmp_path, [Share([], 1, [])], "fails.py").stderr.splitlines()
    assert lines[0].startswith("Traceback") and 'fails.py", line 3, in <module>' in lines[1]
    done = started(tmp_path, [Share([], 1, [])], "no-such-program", no_python=True)
    assert done.returncode == 1
    words = "python -m zshard run: cannot start 'no-such-program': No such file or directory"
    assert done.stderr.strip() == words


def test_modules_of_the_users_folder_do_not_come_first(tmp_path: Path, script: str) -> None:
    for name in ("bind", "signal", "contextlib"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    (tmp_path / "quiet.sh").write_text("echo started")
    words = ["sh", "quiet.sh"]
    assert started(tmp_path, [Share([], 1, [])], *words, no_python=True).stdout == "started\n"


class Recorder:
    """Takes system calls down; policy: what get_mempolicy says; error: what all raise."""

    def __init__(self, policy: int = 0, error: OSError | None = None) -> None:
        self.calls: list[tuple] = []
        self.policy, self.error = policy, error

    def __call__(self, number: int, *arguments) -> int:
        if self.error is not None:
            raise self.error
        name = {bind._numbers()[0]: "set", bind._numbers()[1]: "get"}[number]
        if name == "get":
            arguments[0]._obj.value = self.policy
        else:
            arguments = (arguments[0], list(arguments[1]), arguments[2])
        self.calls.append((name, *arguments))
        return 0


@pytest.mark.parametrize(
    ("nodes", "call"),
    [
        ([0], ("set", 1, [1], 65)),  # MPOL_PREFERRED
        ([1], ("set", 1, [2], 65)),
        ([2, 3], ("set", 3, [12], 65)),  # MPOL_INTERLEAVE
        ([0, 64], ("set", 3, [1, 1], 129)),
    ],
)
def test_memory_is_placed(nodes: list[int], call: tuple) -> None:
    recorder = Recorder()
    bind.bind([], 0, nodes, {}, recorder)
    assert recorder.calls == [call]


def test_no_policy_without_nodes_and_none_over_the_users() -> None:
    recorder, environ = Recorder(), {}
    bind.bind([], 4, [], environ, recorder)
    assert recorder.calls == [] and environ == {"OMP_NUM_THREADS": "4"}
    assert not bind.has_memory_policy(Recorder(policy=0))
    assert bind.has_memory_policy(Recorder(policy=2))  # numactl --membind


def test_what_is_refused_leaves_all_else_in_place() -> None:
    environ: dict[str, str] = {}
    refused = Recorder(error=PermissionError(1, "Operation not permitted"))
    bind.bind([], 2, [0], environ, refused)
    assert environ == {"OMP_NUM_THREADS": "2"}
    with pytest.raises(PermissionError):
        bind.has_memory_policy(refused)


def test_the_kernel_takes_the_policy() -> None:
    code = f"""
import sys; sys.path.insert(0, {str(Path(bind.__file__).parent)!r})
import bind
try:
    before = bind.has_memory_policy()
    bind.place_memory([0])
except OSError as error:
    print("refused", error)
else:
    print(before, bind.has_memory_policy(), "prefer" in open("/proc/self/numa_maps").read())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.stdout.startswith("refused"):
        pytest.skip(f"the kernel or the container refuses memory policies: {done.stdout}")
    assert done.stdout.split() == ["False", "True", "True"], done.stderr


def test_an_unknown_machine_has_no_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    name = os.uname_result(("Linux", "x", "6", "v", "vax"))
    monkeypatch.setattr(os, "uname", lambda: name)
    with pytest.raises(OSError, match="not known for vax"):
        bind.has_memory_policy(lambda *_: ctypes.c_int(0))
