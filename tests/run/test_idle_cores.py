"""The warning where torchrun's OMP_NUM_THREADS=1 leaves cores idle: when, where, and how often.

This machine may have no core to spare, so the ranks are told of more.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from nursery import fork_ranks
from spawn import _python_path

from zshard import FSDP, fully_shard
from zshard.run import idle_cores


def test_it_comes_where_each_rank_could_have_another_core() -> None:
    for ranks, threads, cores in [(2, 1, 2), (2, 1, 3), (2, 4, 8)]:
        assert idle_cores.idle_cores(ranks, threads, cores) == ""
    for ranks, threads, cores, more in [(2, 1, 4, 2), (4, 1, 64, 16), (1, 1, 8, 8), (2, 3, 8, 4)]:
        text = idle_cores.idle_cores(ranks, threads, cores)
        assert f"the {ranks} ranks of this host may use {cores} physical cores" in text
        assert f"`python -m zshard run -n {ranks}`" in text
        assert f"set OMP_NUM_THREADS={more}" in text


def started_by(folder: Path, environ: bytes | None) -> bool:
    """Whether the 1 counts as torchrun's own if it was started with that environment."""
    (folder / "proc/7").mkdir(parents=True, exist_ok=True)
    if environ is not None:
        (folder / "proc/7/environ").write_bytes(environ)
    return idle_cores.is_torchruns_choice(7, folder)


def test_a_choice_of_the_user_is_told_from_torchruns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not started_by(tmp_path, b"HOME=/\0")  # no torchrun: as in the ranks of tests
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert started_by(tmp_path, b"HOME=/\0MY_OMP_NUM_THREADS=1\0")
    assert not started_by(tmp_path, b"HOME=/\0OMP_NUM_THREADS=1\0")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert not started_by(tmp_path, b"HOME=/\0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "proc/7/environ").unlink()
    assert not started_by(tmp_path, None)


def wrap() -> list[str]:
    """The warnings of three models on a rank with cores to spare, with the name of their file."""
    os.environ.update(TORCHELASTIC_RUN_ID="none", OMP_NUM_THREADS="1")
    idle_cores.is_torchruns_choice = lambda parent: True
    idle_cores.os = type("os", (), {**vars(os), "sched_getaffinity": lambda _: set(range(64))})
    idle_cores.read_topology = lambda affinity: type("T", (), {"usable": len(affinity)})
    torch.set_num_threads(1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for wrapped in (FSDP, fully_shard, FSDP):
            wrapped(torch.nn.Linear(4, 4))
    return [f"{Path(each.filename).name}: {each.message}" for each in found]


def test_one_warning_on_the_first_rank_of_a_host() -> None:
    first, second = fork_ranks(wrap, 2, check=True)
    assert [line[:35] for line in first.value] == ["test_idle_cores.py: cores are idle:"], first
    assert second.value == []


def test_torchrun_sets_what_is_taken_for_its_choice(tmp_path: Path) -> None:
    """A torchrun of the installed torch, with and without the user's own OMP_NUM_THREADS."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os\nif os.environ['RANK'] == '0':\n"
        "    from zshard.run.idle_cores import is_torchruns_choice\n"
        "    print(is_torchruns_choice(os.getppid()))\n"
    )
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    env = {**os.environ, "PYTHONPATH": _python_path()}
    env.pop("OMP_NUM_THREADS", None)
    done = subprocess.run([*words, str(script)], capture_output=True, text=True, env=env)
    assert done.stdout == "True\n", done.stderr
