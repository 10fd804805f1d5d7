"""Runs that continue on another number of ranks end with the weights of one undisturbed run."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from any_world_training import OPTIMIZERS, digest_of, make, train_step
from nursery import fork_ranks

import zshard

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic.py"
MICRO_BATCHES = 5


def continue_until(folder: str, until: int, strategy: str) -> tuple[Any, str]:
    """Load the newest checkpoint, train until a step, and save."""
    model = make(MICRO_BATCHES, strategy=strategy)
    optimizer = OPTIMIZERS["adamw"](model)
    saved = zshard.latest_checkpoint(folder)
    start = zshard.load(saved, model, optimizer).step if saved else 0
    losses: dict[tuple[int, int], float] = {}
    for step in range(start, until):
        losses |= train_step(model, optimizer, step)
    zshard.save(folder, model, optimizer, step=until, keep_last=2)
    return losses, digest_of(model)


@pytest.mark.parametrize("changes", [4, pytest.param(20, marks=pytest.mark.thorough)])
def test_the_number_of_ranks_changes_between_runs(changes: int, tmp_path: Path) -> None:
    chosen = random.Random(changes)
    strategies = ("full_shard", "no_shard", "zero1", "shard_grad_op")
    until, found, digest, world = 0, {}, "", 0
    for _ in range(changes + 1):
        world = chosen.choice([each for each in (1, 2, 3, 4) if each != world])
        until += chosen.randint(1, 3)
        given = (str(tmp_path / "here"), until, chosen.choice(strategies))
        for result in fork_ranks(continue_until, world, *given, timeout=90, check=True):
            found |= result.value[0]
            digest = result.value[1]
    undisturbed = (str(tmp_path / "alone"), until, "no_shard")
    assert fork_ranks(continue_until, 1, *undisturbed, check=True)[0].value == (found, digest)


# --- under torchrun -------------------------------------------------------------------------------


def agent(port: int, *flags: str) -> subprocess.Popen[str]:
    """One of one or two agents of a run, each with one rank; the survivor continues alone."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic"),
        *("--rdzv-conf=last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=4",),
        *("--max-restarts=5", str(EXAMPLE), *flags),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def kill_with_ranks(agent: subprocess.Popen[str]) -> None:
    """Kill an agent and its ranks, which have their own sessions: a lost host."""
    if agent.poll() is not None:
        return
    ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    for pid in (agent.pid, *map(int, ranks)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def weights_in(text: str) -> str:
    found = re.search(r"weights after \d+ steps: (\w+)", text)
    assert found is not None, text
    return found[1]


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_lost_agent_leaves_fewer_ranks(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ("--save", str(tmp_path / "run"), "--until", "200", "--every", "5")
    first = agent(port, *flags)
    while not answers(port):  # it has the store: the other one can be lost
        time.sleep(0.05)
    second = agent(port, *flags)
    try:
        while len(list((tmp_path / "run").glob("*"))) < 3:
            assert first.poll() is None, first.communicate()[0]
            time.sleep(0.1)
        kill_with_ranks(second)
        text = first.communicate(timeout=200)[0]
    finally:
        kill_with_ranks(first)
        kill_with_ranks(second)
    alone = subprocess.run(
        [sys.executable, EXAMPLE, "--save", str(tmp_path / "alone"), "--until", "200"],
        capture_output=True, text=True, env={**os.environ, **ONE_RANK}, check=True,
    )  # fmt: skip
    assert weights_in(text) == weights_in(alone.stdout)
    assert "step 1:" in text and text.count("step 100:") >= 1


ONE_RANK = {
    "OMP_NUM_THREADS": "1",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
