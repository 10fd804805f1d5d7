"""The cores that this process may use, and each rank's share of them.

The kernel's files in /sys list the hardware; the affinity mask, which taskset and a container's
cpuset narrow, lists what this process may use. Without these files, the host counts as one NUMA
node, and each CPU as a core. A limit may be set on any control group above the process's own, so
all of them are walked.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from zshard.api import ControlGroup

BINDINGS = ("core", "numa", "none")
_CPUS, _NODES = "sys/devices/system/cpu", "sys/devices/system/node"


class Core(NamedTuple):
    """A physical core. cpu: the first of its hyperthreads that this process may use."""

    node: int
    cpu: int


class Host(NamedTuple):
    """The part of its host that this process may use: cores, by node and number, and the CPU time
    that its control groups allow, None for all."""

    cores: list[Core]
    quota: float | None

    @property
    def is_throttled(self) -> bool:
        """True if a quota allows less than the cores' time."""
        return self.quota is not None and self.quota < len(self.cores)

    @property
    def usable(self) -> int:
        """Number of threads that may compute at the same time, one per core."""
        return max(1, int(self.quota or 0)) if self.is_throttled else len(self.cores)

    @property
    def nodes(self) -> int:
        """The number of NUMA nodes with cores."""
        return len({core.node for core in self.cores})


class Share(NamedTuple):
    """The CPUs and NUMA nodes on which one rank computes and allocates. [] leaves them as they
    are."""

    cpus: list[int]
    nodes: list[int]


def read_host(root: Path = Path("/"), affinity: Iterable[int] | None = None) -> Host:
    """Return what this process may use of its host. affinity: its CPUs; by default, from the
    kernel."""
    allowed = set(os.sched_getaffinity(0) if affinity is None else affinity)
    node_of = {}
    for folder in (root / _NODES).glob("node[0-9]*"):
        node_of.update(dict.fromkeys(_numbers(folder / "cpulist"), int(folder.name[4:])))
    cores: dict[frozenset[int], Core] = {}
    for cpu in sorted(allowed):
        siblings = _numbers(root / _CPUS / f"cpu{cpu}/topology/core_cpus_list") or {cpu}
        cores.setdefault(frozenset(siblings), Core(node_of.get(cpu, 0), cpu))
    quotas = list(map(_quota_of, ControlGroup.all("cpu", root)))
    return Host(sorted(cores.values()), min(filter(None, quotas), default=None))


def shares_of(host: Host, ranks: int, binding: str) -> tuple[list[Share], int, str]:
    """Return a share for each rank, the number of threads that each computes on, and why they are
    not bound as requested, or "". All ranks get equally many cores, node by node."""
    unbound, each = [Share([], [])] * ranks, host.usable // ranks
    if binding == "none":
        return unbound, max(1, each), ""
    if each == 0:
        cores = f"{ranks} ranks share {host.usable} core(s)"
        return unbound, 1, f"{cores}, so they are not bound: pass a smaller -n"
    if host.is_throttled:  # others with a quota may choose the same cores
        quota = f"a quota of {host.quota:g} CPUs' time applies to {len(host.cores)} cores"
        return unbound, each, f"{quota}, so ranks are not bound: give the container a cpuset"
    shares = []
    for rank in range(ranks):
        chosen = host.cores[rank * len(host.cores) // ranks :][:each]
        nodes = {core.node for core in chosen}
        if binding == "numa":
            chosen = [core for core in host.cores if core.node in nodes]
        cpus = sorted(core.cpu for core in chosen)
        shares.append(Share(cpus, sorted(nodes) if host.nodes > 1 else []))
    return shares, each, ""


def _quota_of(group: ControlGroup) -> float | None:
    """Return how many CPUs' time a control group allows; None: no limit."""
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if group.is_old else ("cpu.max",)
    words = " ".join(map(group.read, names)).split()
    if len(words) != 2 or not all(word.isdigit() for word in words):  # "max", "-1", no file
        return None
    quota, period = map(int, words)
    return quota / period if period else None


def parse_list(text: str) -> set[int]:
    """Return the numbers of a list such as "0-3,8"; an empty list for any other text."""
    numbers: set[int] = set()
    try:
        for part in text.strip().split(","):
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
    except ValueError:
        return set()
    return numbers


def as_list(numbers: Iterable[int]) -> str:
    """Return numbers as the kernel writes them: "0-3,8"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def _numbers(file: Path) -> set[int]:
    with contextlib.suppress(OSError):
        return parse_list(file.read_text())
    return set()
