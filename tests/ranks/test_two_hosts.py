"""Training on two hosts: losses equal DDP's, and errors instead of hangs if a rank dies or the wire
is cut.

Hosts are namespaces of this machine with a wire between them (benchmarks/hosts_net.py), so ranks of
different hosts share only TCP, and a test can cut the connection.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from nursery import SLACK, connect, result_of, start_nursery
from scenario import Scenario
from tasks import RankResult, task_of
from test_failures import Misdeed, check_survivors, make_model, step_once, train, wrap

import zshard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not installed

from benchmarks.hosts_net import INTERFACE, SPACES, Hosts, HostsUnavailable


class HostedRanks:
    """Standing hosts; a context manager that ends them. Raises HostsUnavailable where none can be
    created."""

    def __init__(self, count: int) -> None:
        with contextlib.ExitStack() as stack:
            self.hosts = stack.enter_context(Hosts(count))
            self._hosts: list[Connection] = []
            for host in self.hosts.all:
                spaces = [f"/proc/{host.pid}/ns/{space}" for space in SPACES]
                self._hosts.append(connect(start_nursery(), spaces=spaces))
                stack.callback(self._hosts[-1].close)
            self._stack = stack.pop_all()

    def __enter__(self) -> HostedRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(
        self, function: Any, ranks: int, *args: Any, meanwhile: Any = lambda: None
    ) -> list[RankResult]:
        """Run function(*args) on so many fresh ranks of each host, and `meanwhile` here; return how
        each rank ended. One that ran into the limit has no returncode."""
        store = self.hosts.store()  # lives as long as they do
        variables = {**self.hosts.environment(store, ranks), "GLOO_SOCKET_IFNAME": INTERFACE}
        codes: list[int | None] = []
        with tempfile.TemporaryDirectory(prefix="zshard-hosted-") as folder:
            for index, host in enumerate(self._hosts):
                own = range(index * ranks, (index + 1) * ranks)
                host.send((task_of(function, args), own, folder, LIMIT, variables, None))
            meanwhile()
            for host in self._hosts:
                if not host.poll(LIMIT + SLACK):
                    raise TimeoutError("a host's nursery does not answer")
                codes += host.recv()
            return [result_of(Path(folder), rank, code) for rank, code in enumerate(codes)]


LIMIT = 60.0
"""Seconds after which ranks are killed."""

STRATEGIES = ("full_shard", "hybrid_shard")
BOUND = 1e-5
"""Relative: DDP sums four ranks' gradients in another order than that of the ranks."""

DEADLINE = 2.0
"""Seconds that a wait may last."""

PATIENCE = 30.0
"""Seconds within which a rank has ended after that, on a loaded machine."""


@pytest.fixture(scope="module")
def hosted() -> Iterator[HostedRanks]:
    try:
        made = HostedRanks(2)
    except HostsUnavailable as error:
        pytest.skip(f"needs root and network namespaces: {error}")
    with made:
        yield made


def losses_of_all(name):
    """Return both libraries' losses of a few steps on this rank."""
    dist.init_process_group("gloo")
    scenario = Scenario(name, optimizer="torch.SGD", steps=4)
    losses = {"ddp": scenario.ddp(None).losses}
    for strategy in STRATEGIES:
        losses[strategy] = scenario.but(way=(strategy, "auto")).sharded(None).losses
    dist.destroy_process_group()
    return losses


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_match_ddp(hosted, ranks):
    results = hosted.run(losses_of_all, ranks, "net")
    for result in results:
        assert result.returncode == 0, f"rank {result.rank}\n{result.stderr}"
        losses = {side: torch.tensor(values) for side, values in result.value.items()}
        where = f"losses of rank {result.rank}"
        if ranks == 1:  # a sum of two does not depend on their order
            assert_same(losses["full_shard"], losses["ddp"], where)
        torch.testing.assert_close(losses["full_shard"], losses["ddp"], rtol=BOUND, atol=0)
        assert_same(losses["hybrid_shard"], losses["full_shard"], where)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rank_killed_on_one_host_is_named_on_both(hosted, strategy, tmp_path):
    arguments = ("kill", "backward", tmp_path, "auto", 60.0, strategy)
    results = hosted.run(train, 2, *arguments)
    check_survivors(results, ("PeerError",), "rank 3 (pid ", "exited", within=PATIENCE)


def train_until_cut(folder, strategy):
    """Train until an error; return the resulting `End`. Reports when the wire may be cut."""
    misdeed = Misdeed("", "", folder)
    ready = Path(folder) / f"ready{os.environ['RANK']}"

    def loop():
        model = wrap(make_model(misdeed), "auto", DEADLINE, strategy)
        optimizer = zshard.SGD(model.parameters(), lr=0.01)
        for step in range(10**9):
            step_once(model, optimizer, misdeed, step)
            if step == 2:
                ready.touch()

    end = misdeed.end_of(loop)
    # Otherwise its neighbor would report a rank that exited earlier, instead of the other host.
    Path(folder, f"ended{os.environ['RANK']}").touch()
    wait_for(Path(folder), "ended")
    return end


def wait_for(folder, what):
    """Wait until all four ranks have reported, for 20 seconds at most. Return how many have."""
    limit = time.monotonic() + 20
    while (count := len(list(folder.glob(f"{what}*")))) < 4 and time.monotonic() < limit:
        time.sleep(0.02)
    return count


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_cut_wire_is_an_error_on_every_rank(hosted, strategy, tmp_path):
    host = hosted.hosts.all[1]

    def cut():
        assert wait_for(tmp_path, "ready") == 4, "the ranks do not train"
        (tmp_path / "time").write_text(str(time.monotonic()))
        host.cut()

    try:
        results = hosted.run(train_until_cut, 2, tmp_path, strategy, meanwhile=cut)
    finally:
        host.mend()
    for result in results:
        assert result.returncode == 0, f"rank {result.rank}: {result}"
        kinds = ("PeerError", "PeerTimeoutError")
        assert result.value.kind in kinds, f"rank {result.rank} ended with {result.value}"
        others = "2, 3" if result.rank < 2 else "0, 1"
        assert others in result.value.message, result.value
        assert result.value.seconds < DEADLINE + PATIENCE, result.value
