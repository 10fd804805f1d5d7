"""deterministic="any-world": one checksum for each number of ranks, strategy, transport, optimizer
and precision; also of runs that continue on another number of ranks.
"""

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
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from any_world_training import OPTIMIZERS, Model, digest_of, loss_of, make, train, train_step
from nursery import fork_ranks
from spawn import RankPool, on_ranks

import zshard
from zshard import FSDP

STRATEGIES = ("full_shard", "shard_grad_op", "zero1", "no_shard")

Numbers = tuple[dict[tuple[int, int], float], str]


def train_here(options: dict[str, Any]) -> Any:
    return train(**options)


def merged(results: list[Numbers]) -> Numbers:
    """Return all ranks' losses, and the digest that all ranks must have."""
    losses: dict[tuple[int, int], float] = {}
    for mine, digest in results:
        assert all(losses.get(key, loss) == loss for key, loss in mine.items())
        losses |= mine
        assert digest == results[0][1]
    return losses, results[0][1]


@pytest.fixture(scope="module")
def alone() -> Callable[..., Numbers]:
    """The numbers of one rank without sharding, computed once."""
    known: dict[str, Numbers] = {}

    def numbers(**options: Any) -> Numbers:
        key = repr(sorted(options.items()))
        if key not in known:
            (result,) = fork_ranks(train_here, 1, {"strategy": "no_shard", **options}, check=True)
            known[key] = merged([result.value])
        return known[key]

    return numbers


CELLS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [  # ranks, how, and what is trained
    (world, {"strategy": strategy, "transport": transport}, {})
    for world in (2, 3, 4)
    for strategy in STRATEGIES
    for transport in ("shm", "c10d")
]
CELLS += [(1, {"strategy": strategy}, {}) for strategy in STRATEGIES]
CELLS += [(world, {}, {"micro_batches": n}) for n in (4, 5, 7) for world in (2, 3, 4)]
CELLS += [
    (world, {"strategy": strategy}, {"optimizer": optimizer})
    for optimizer in ("adamw 8 bit", "torch's momentum", "muon")
    for world in (2, 3)
    for strategy in ("full_shard", "no_shard")
]
CELLS += [(3, {}, {"bf16": True}), (2, {"strategy": "no_shard"}, {"bf16": True})]
CELLS += [
    (4, {"strategy": strategy, "per_host": 2}, {})
    for strategy in ("full_shard", "hybrid_shard", "hybrid_shard_zero2", "hybrid_full")
]
CELLS += [(4, {"strategy": "zero1", "per_host": 1}, {})]


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("world", "how", "what"), CELLS, ids=str)
def test_any_cell_has_the_numbers_of_one_rank(
    pools: dict[int, RankPool],
    alone: Callable[..., Numbers],
    world: int,
    how: dict[str, Any],
    what: dict[str, Any],
) -> None:
    options = {**how, **what}
    if "per_host" in how:  # which ranks would remember
        forked = fork_ranks(train_here, world, options, timeout=120, check=True)
        results = [result.value for result in forked]
    else:
        results = pools.setdefault(world, RankPool(world)).run(train_here, options)
    assert merged(results) == alone(**what)


@on_ranks(2)
def test_memory_of_gradients_is_predicted() -> None:
    for micro_batches, strategy in product([2, 3, 7, 16], ["full_shard", "no_shard"]):
        model = make(micro_batches, strategy=strategy)
        predicted = model.memory("predicted")["grads"]
        for index in model.micro_batches(0):
            loss_of(model, 0, index).backward()
        peak = model.memory("peak")["grads"]
        # `never` and `seldom` have few
        assert 0 <= predicted - peak <= predicted // 4, (micro_batches, strategy)


@on_ranks(3)
def test_the_sum_is_that_of_a_tree() -> None:
    """What plain PyTorch gives, added in the same order."""
    model = make(5)
    for index in model.micro_batches(0):
        loss_of(model, 0, index).backward()
    torch.manual_seed(0)
    plain = Model().eval()
    model.zero_grad()
    model.eval()
    for index in model.micro_batches(0):
        loss_of(model, 0, index).backward()
    leaves = []
    for index in range(5):
        plain.zero_grad()
        loss_of(plain, 0, index).backward()
        leaves.append(
            {n: p.grad.clone() for n, p in plain.named_parameters() if p.grad is not None}
        )
    with FSDP.summon_full_params(model, with_grads=True):
        for name, param in model.named_parameters():
            a, b, c, d, e = (each.get(name, torch.zeros(())) for each in leaves)
            total = (((a + b) + (c + d)) + e) * (1 / 5)
            assert (param.grad is None) == (name.startswith("never")), name
            if param.grad is not None:
                assert torch.equal(param.grad, total.expand_as(param.grad)), name


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
    """Kill an agent and its ranks, which have sessions of their own: a lost host."""
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
