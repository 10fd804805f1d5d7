"""Which cores each rank of this host computes on, with how many threads, and where its memory lies.

All ranks have equally many cores, since each step waits for the slowest, and a rank
stays within a NUMA node (or socket) unless that would leave more than a quarter of its cores idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from zshard.run.topology import Core, Topology

BINDINGS = ("core", "socket", "numa", "none")


class Share(NamedTuple):
    """What one rank gets. cpus: those that it may run on; [] leaves them as they are. threads: for
    OMP_NUM_THREADS. nodes: the NUMA nodes of its memory; [] leaves them as they are."""

    cpus: list[int]
    threads: int
    nodes: list[int]


def shares_of(topology: Topology, ranks: int, binding: str) -> tuple[list[Share], str]:
    """Return a share for each rank of this host, and why they are not bound as asked, or ""."""
    cores, threads = topology.cores, max(1, topology.usable // ranks)
    unbound = [Share([], threads, [])] * ranks
    if binding == "none":
        return unbound, ""
    if ranks > topology.usable:
        return unbound, (
            f"{ranks} ranks share {topology.usable} core(s), so they are not bound and "
            "each computes on one thread: pass a smaller -n unless this is a test"
        )
    if topology.is_throttled:
        return unbound, (
            f"a quota of {topology.quota:g} CPUs' time applies to {len(cores)} cores "
            "(cpu.max of the control group), so ranks are not bound: others with a quota may "
            "choose the same cores. Give the container a cpuset to bind ranks"
        )
    domain = _socket_of if binding == "socket" else _node_of
    parts = _parts(cores, ranks, domain)
    shares = []
    for part in parts:
        own = part
        if binding != "core":
            domains = {domain(core) for core in part}
            own = [core for core in cores if domain(core) in domains]
        nodes = {core.node for core in own} & topology.memory if len(topology.memory) > 1 else ()
        shares.append(Share(sorted(core.cpu for core in own), len(part), sorted(nodes)))
    return shares, ""


def ranks_for(topology: Topology) -> int:
    """Return how many ranks a host without GPUs runs well: one for each NUMA node with cores."""
    return max(1, min(len({core.node for core in topology.cores}), topology.usable))


def _socket_of(core: Core) -> int:
    return core.socket


def _node_of(core: Core) -> tuple[int, int]:
    return core.socket, core.node


def _parts(cores: list[Core], ranks: int, domain: Callable[[Core], object]) -> list[list[Core]]:
    """Equally many cores for each rank, at most as many ranks as cores."""
    sizes = Counter(map(domain, cores))  # in the order of cores
    guests = dict.fromkeys(sizes, 0)
    for _ in range(ranks):  # each to where the least that a rank gets is largest
        best = max(sizes, key=lambda each: sizes[each] // (guests[each] + 1))
        guests[best] += 1
    within = min(sizes[each] // guests[each] for each in sizes if guests[each])
    across = len(cores) // ranks
    if 4 * within < 3 * across:
        return [cores[rank * across : (rank + 1) * across] for rank in range(ranks)]
    parts = []
    for each, count in guests.items():
        own = [core for core in cores if domain(core) == each]
        parts += [own[i * len(own) // count :][:within] for i in range(count)]
    return parts


def as_list(cpus: list[int]) -> str:
    """Return sorted numbers as the kernel writes them: "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1][1:] = [cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs)
