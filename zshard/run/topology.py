"""The cores of this host, and which of them this process may use.

The kernel's files in /sys say what is there, the process's affinity mask (which
taskset, and the cpuset of a container, narrow) what it may use. A file that is missing costs
knowledge, not a crash: CPUs without a known sibling are cores, and all is one socket and node.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from zshard.run.cgroups import ROOT, cpu_quota, read_text

_CPUS = "sys/devices/system/cpu"
_NODES = "sys/devices/system/node"


class Core(NamedTuple):
    """A physical core. cpu: the first of its hyperthreads that this process may use."""

    socket: int
    node: int
    cpu: int


class Topology(NamedTuple):
    """What a host has, and what of it this process may use.

    cores: the physical cores that this process may use, by socket, NUMA node and number. sockets,
    nodes, physical, hyperthreads: counts of the whole host, online. memory: the NUMA nodes that
    this process may allocate from. quota: CPUs' time that its control groups allow; None: all.
    """

    cores: list[Core]
    sockets: int
    nodes: int
    physical: int
    hyperthreads: int
    memory: frozenset[int]
    quota: float | None

    @property
    def is_throttled(self) -> bool:
        """Whether a quota allows less than the cores' time."""
        return self.quota is not None and self.quota < len(self.cores)

    @property
    def usable(self) -> int:
        """How many threads may compute at once, a core each."""
        return max(1, int(self.quota or 0)) if self.is_throttled else len(self.cores)


def read_topology(root: Path = ROOT, affinity: Iterable[int] | None = None) -> Topology:
    """Return the topology of the host; `affinity`: the CPUs that this process may use, by default
    what the kernel says."""
    allowed = set(os.sched_getaffinity(0) if affinity is None else affinity)
    online = parse_list(read_text(root / _CPUS / "online")) | allowed  # lxcfs may tell others
    nodes = {cpu: node for node, cpus in _nodes(root) for cpu in cpus}
    siblings: dict[frozenset[int], list[int]] = {}
    for cpu in sorted(online):
        siblings.setdefault(_siblings(root, cpu, online), []).append(cpu)
    all_cores = [
        [Core(_socket(root, cpu), nodes.get(cpu, 0), cpu) for cpu in cpus]
        for cpus in siblings.values()
    ]
    mine = [[each for each in threads if each.cpu in allowed] for threads in all_cores]
    return Topology(
        cores=sorted(threads[0] for threads in mine if threads),
        sockets=len({threads[0].socket for threads in all_cores}),
        nodes=len({threads[0].node for threads in all_cores}),
        physical=len(all_cores),
        hyperthreads=len(online),
        memory=_memory(root),
        quota=cpu_quota(root),
    )


def parse_list(text: str | None) -> set[int]:
    """Return the numbers of a list such as "0-3,8"; none if there is no text, or another one."""
    found: set[int] = set()
    try:
        for part in filter(None, (text or "").strip().split(",")):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except ValueError:
        return set()
    return found


def _siblings(root: Path, cpu: int, online: set[int]) -> frozenset[int]:
    """The hyperthreads of a CPU's core; newer kernels have the first of the files."""
    for name in ("core_cpus_list", "thread_siblings_list"):
        found = parse_list(read_text(root / _CPUS / f"cpu{cpu}/topology" / name)) & online
        if cpu in found:
            return frozenset(found)
    return frozenset({cpu})


def _socket(root: Path, cpu: int) -> int:
    text = (read_text(root / _CPUS / f"cpu{cpu}/topology/physical_package_id") or "").strip()
    return int(text) if text.isdigit() else 0  # "-1": not known


def _nodes(root: Path) -> Iterator[tuple[int, set[int]]]:
    for folder in (root / _NODES).glob("node[0-9]*"):
        if folder.name[4:].isdigit():
            yield int(folder.name[4:]), parse_list(read_text(folder / "cpulist"))


def _memory(root: Path) -> frozenset[int]:
    """The NUMA nodes that have memory and that a cpuset leaves to this process."""
    there = parse_list(read_text(root / _NODES / "has_memory"))
    status = read_text(root / "proc/self/status") or ""
    allowed = [line for line in status.splitlines() if line.startswith("Mems_allowed_list:")]
    if not allowed:
        return frozenset(there)
    return frozenset(there & parse_list(allowed[0].partition(":")[2]))
