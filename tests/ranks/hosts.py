"""Ranks on several hosts, which benchmarks/hosts_net.py simulates on this machine. The session's
nursery forks them.

from hosts import HostedRanks

with HostedRanks(2) as hosted:
    results = hosted.run(function, 2, *arguments)  # on 2 ranks of each host, as fork_ranks
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nursery import SLACK, connect, result_of, start_nursery
from tasks import RankResult, task_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not installed

from benchmarks.hosts_net import INTERFACE, SPACES, Hosts
from benchmarks.hosts_net import HostsUnavailable as HostsUnavailable


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

    def run(self, function: Any, ranks: int, *args: Any, timeout: float = 60) -> list[RankResult]:
        """Run function(*args) on so many fresh ranks of each host; return how each rank ended."""
        return self.start(function, ranks, *args, timeout=timeout).wait()

    def start(self, function: Any, ranks: int, *args: Any, timeout: float = 60) -> Running:
        """As run(), without waiting; wait for it before the next."""
        store = self.hosts.store()
        variables = {**self.hosts.environment(store, ranks), "GLOO_SOCKET_IFNAME": INTERFACE}
        folder = tempfile.TemporaryDirectory(prefix="zshard-hosted-")
        for index, host in enumerate(self._hosts):
            own = range(index * ranks, (index + 1) * ranks)
            host.send((task_of(function, args), own, folder.name, timeout, variables, None))
        return Running(self._hosts, store, folder, timeout)


class Running:
    """Running ranks. `store` is theirs, and lives as long as this object."""

    def __init__(self, hosts: list[Connection], store: Any, folder: Any, timeout: float) -> None:
        self._hosts, self.store, self._folder = hosts, store, folder
        self._timeout = timeout

    def wait(self) -> list[RankResult]:
        """Return how each rank ended; one that ran into the limit has no returncode."""
        codes: list[int | None] = []
        for host in self._hosts:
            if not host.poll(self._timeout + SLACK):
                raise TimeoutError("a host's nursery does not answer")
            codes += host.recv()
        results = [
            result_of(Path(self._folder.name), rank, code) for rank, code in enumerate(codes)
        ]
        self._folder.cleanup()
        return results
