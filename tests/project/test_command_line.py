"""`python -m zshard`: its version, and commands whose output nothing reads to the end, as `| head`."""

from __future__ import annotations

import os
import runpy
import signal
import sys
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
    """Write the commands' input; return the folder."""
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
