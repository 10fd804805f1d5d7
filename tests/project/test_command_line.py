"""`zshard` and `python -m zshard`: names, version, and commands whose output nothing reads to the end, as `| head`."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from nursery import fork_ranks
from spawn import RankResult

import zshard
from zshard.extras.trace import Trace
from zshard.extras.trace.records import RankTrace

PLAN = "plan --gpus 8 --gpu h100 --layers 2 --width 64 --heads 2 --vocab 100 --seq 128 --batch 8"
COMMANDS = [
    *("--version", "--help", "doctor"),
    *(PLAN, f"{PLAN} --json"),
    *("ckpt inspect saved", "checkpoint inspect saved --json", "ckpt verify saved"),
    "ckpt export saved exported",
    *("trace rank0.json", "trace --json rank0.json"),
]


def as_program(folder: str, *words: str) -> None:
    os.chdir(folder)
    sys.argv = ["zshard", *words]
    sys.modules.pop("zshard.__main__", None)  # another test's rank may have been forked with it
    runpy.run_module("zshard", run_name="__main__", alter_sys=True)


def into_a_closed_pipe(unbuffered: bool, folder: str, *words: str) -> None:
    out, into = os.pipe()
    os.close(out)
    sys.stdout = open(os.dup(into), "w", buffering=1 if unbuffered else -1)  # noqa: SIM115
    as_program(folder, *words)


def of_files(folder: Path) -> str:
    """Write what the commands read; return the folder."""
    zshard.save(folder / "saved", torch.nn.Linear(2, 2))
    ranges = [("zshard::forward (root)", 9, 2000, 3500)]
    Trace([RankTrace(0, "host", 9, 0, 9000, 10**18, 0, ranges)]).export(folder / "rank0.json")
    return str(folder)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("unbuffered", [True, False])
@pytest.mark.parametrize("command", COMMANDS)
def test_closed_pipe_ends_a_command_silently(
    command: str, unbuffered: bool, tmp_path: Path
) -> None:
    """Unbuffered as long output: a command's own print fails, not the last flush."""
    folder = of_files(tmp_path)
    (done,) = fork_ranks(into_a_closed_pipe, 1, unbuffered, folder, *command.split())
    assert (done.stderr, done.returncode) == ("", 128 + signal.SIGPIPE)


def test_commands_print_their_output(tmp_path: Path) -> None:
    folder = of_files(tmp_path)

    def said(command: str) -> RankResult:
        (done,) = fork_ranks(as_program, 1, folder, *command.split())
        assert done.stderr == "", done.stderr
        return done

    done = said("--version")
    assert (done.stdout, done.returncode) == (f"zshard {zshard.__version__}\n", 0)
    where = f"zshard      {zshard.__version__} in {zshard.__path__[0]}\n"
    assert where in said("doctor").stdout
    done = said("ckpt inspect saved")
    assert "weight" in done.stdout and done.returncode == 0


# --- the script `zshard` --------------------------------------------------------------------------


def as_script(name: str, folder: str, *words: str) -> None:
    """Do as the script that pip makes of an entry point."""
    os.chdir(folder)
    sys.argv = [name, *words]
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    entry = tomllib.loads(text)["project"]["scripts"]["zshard"]
    sys.exit(EntryPoint("zshard", entry, "console_scripts").load()())


def test_help_and_errors_name_what_was_called(tmp_path: Path) -> None:
    for name, program in (("/bin/zshard", "zshard"), ("/x/__main__.py", "python -m zshard")):
        for words, text in (
            ("--help", "usage: {} [-h]"),
            ("run --help", "usage: {} run [-n N]"),
            ("plan --gpus 1", "{} plan: "),
            ("ckpt inspect --help", "usage: {} ckpt inspect [-h]"),
        ):
            (done,) = fork_ranks(as_script, 1, name, str(tmp_path), *words.split())
            assert text.format(program) in done.stdout + done.stderr, (name, words)


def test_script_starts_ranks_and_runs_in_one(tmp_path: Path) -> None:
    """Under torchrun a rank's variables are set, which concern `ckpt collect` alone."""
    (tmp_path / "train.py").write_text("import os\nprint('rank', os.environ['RANK'], flush=True)\n")
    (done,) = fork_ranks(as_script, 1, "zshard", str(tmp_path), "run", "-n", "2", "train.py")
    assert done.returncode == 0 and "rank 0" in done.stdout and "rank 1" in done.stdout
    for done in fork_ranks(as_script, 2, "zshard", str(tmp_path), "--version"):
        assert (done.stdout, done.returncode) == (f"zshard {zshard.__version__}\n", 0)
