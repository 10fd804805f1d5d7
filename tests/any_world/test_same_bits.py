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
WORLDS = (1, 2, 3, 4)

Numbers = tuple[dict[tuple[int, int], float], str]
Runs = Callable[..., Numbers]


@pytest.fixture
def run(pools: dict[int, RankPool]) -> Runs:
    """Train on a number of ranks; return all losses, and the digest that all ranks must have."""

    def train_on(world: int, **options: Any) -> Numbers:
        if "per_host" in options:  # which ranks would remember
            results = fork_ranks(train_here, world, options, timeout=120, check=True)
            return merged([result.value for result in results])
        pool = pools.setdefault(world, RankPool(world))
        return merged(pool.run(train_here, options))

    return train_on


def merged(found: list[Numbers]) -> Numbers:
    losses: dict[tuple[int, int], float] = {}
    for mine, digest in found:
        assert all(losses.get(key, loss) == loss for key, loss in mine.items())
        losses |= mine
        assert digest == found[0][1]
    return losses, found[0][1]


def train_here(options: dict[str, Any]) -> Any:
    return train(**options)


@pytest.fixture(scope="module")
def known() -> dict[str, Numbers]:
    return {}


@pytest.fixture
def alone(run: Runs, known: dict[str, Numbers]) -> Runs:
    """The numbers of one rank without sharding, computed once."""

    def numbers(**options: Any) -> Numbers:
        key = repr(sorted(options.items()))
        if key not in known:
            known[key] = run(1, strategy="no_shard", **options)
        return known[key]

    return numbers


CELLS = [
    pytest.param(world, strategy, transport, id=f"{world}-{strategy}-{transport}")
    for world in WORLDS
    for strategy in STRATEGIES
    for transport in ("shm", "c10d")
    if world > 1 or transport == "shm"
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("world", "strategy", "transport"), CELLS)
def test_any_cell_has_the_numbers_of_one_rank(
    run: Runs, alone: Runs, world: int, strategy: str, transport: str
) -> None:
    more = {"transport": transport} if world > 1 else {}
    assert run(world, strategy=strategy, **more) == alone()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("micro_batches", [4, 5, 7])
def test_ranks_may_have_one_more_than_others(run: Runs, alone: Runs, micro_batches: int) -> None:
    expected = alone(micro_batches=micro_batches)
    for world in (2, 3, 4):
        assert run(world, micro_batches=micro_batches) == expected


@pytest.mark.sampled(4)
@pytest.mark.parametrize("optimizer", ["adamw 8 bit", "torch's momentum", "muon"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_optimizers(run: Runs, alone: Runs, optimizer: str, world: int, strategy: str) -> None:
    assert run(world, strategy=strategy, optimizer=optimizer) == alone(optimizer=optimizer)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("strategy", "world"), [("full_shard", 3), ("no_shard", 2)])
def test_mixed_precision(run: Runs, alone: Runs, strategy: str, world: int) -> None:
    assert run(world, strategy=strategy, bf16=True) == alone(bf16=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("strategy", "per_host"),
    [
        ("full_shard", 2),
        ("hybrid_shard", 2),
        ("hybrid_shard_zero2", 2),
        ("hybrid_full", 2),
        ("zero1", 1),
    ],
)
def test_hosts(run: Runs, alone: Runs, strategy: str, per_host: int) -> None:
    assert run(4, strategy=strategy, per_host=per_host) == alone()


def peak_and_prediction(micro_batches: int, strategy: str) -> tuple[int, int]:
    model = make(micro_batches, strategy=strategy)
    predicted = model.memory("predicted")
    for index in model.micro_batches(0):
        loss_of(model, 0, index).backward()
    return model.memory("peak")["grads"], predicted["grads"]


@on_ranks(2)
def test_memory_of_gradients_is_predicted() -> None:
    for micro_batches, strategy in product([2, 3, 7, 16], ["full_shard", "no_shard"]):
        peak, predicted = peak_and_prediction(micro_batches, strategy)
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
