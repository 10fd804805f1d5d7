"""The cores that this process may use, and each rank's share of them.

The kernel's files in /sys list the hardware; the affinity mask, which taskset and a container's
cpuset narrow, lists what this process may use. Without these files, the host counts as one NUMA
node, and each CPU as a core. All ranks get equally many cores, since each step waits for the
slowest rank, and a rank stays within a node unless that would leave more than a quarter of its
cores idle.
"""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from zshard._errors import stacklevel
from zshard.run.cgroups import ROOT, cpu_quota, read_text

BINDINGS = ("core", "numa", "none")
_CPUS, _NODES = "sys/devices/system/cpu", "sys/devices/system/node"


class Core(NamedTuple):
    """A physical core. cpu: the first of its hyperthreads that this process may use."""

    node: int
    cpu: int


class Host(NamedTuple):
    """The part of its host that this process may use: cores, by node and number; the NUMA nodes
    that it may allocate from; the CPU time that its control groups allow, None for all."""

    cores: list[Core]
    memory: set[int]
    quota: float | None

    @property
    def is_throttled(self) -> bool:
        """Whether a quota allows less than the cores' time."""
        return self.quota is not None and self.quota < len(self.cores)

    @property
    def usable(self) -> int:
        """How many threads may compute at once, one per core."""
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


def read_host(root: Path = ROOT, affinity: Iterable[int] | None = None) -> Host:
    """Return what this process may use of its host. affinity: its CPUs; by default, from the
    kernel."""
    allowed = set(os.sched_getaffinity(0) if affinity is None else affinity)
    node_of = {}
    for folder in (root / _NODES).glob("node[0-9]*"):
        node_of.update(dict.fromkeys(_numbers(folder / "cpulist"), int(folder.name[4:])))
    cores: dict[frozenset[int], Core] = {}
    for cpu in sorted(allowed):
        files = ("core_cpus_list", "thread_siblings_list")  # the latter: before Linux 5.0
        lists = [_numbers(root / _CPUS / f"cpu{cpu}/topology" / name) for name in files]
        siblings = frozenset(next(filter(None, lists), {cpu}))
        cores.setdefault(siblings, Core(node_of.get(cpu, 0), cpu))
    status = read_text(root / "proc/self/status") or ""
    found = re.search(r"^Mems_allowed_list:\s*(\S*)$", status, re.MULTILINE)
    memory = _numbers(root / _NODES / "has_memory")
    memory = memory & parse_list(found[1]) if found else memory
    return Host(sorted(cores.values()), memory, cpu_quota(root))


def shares_of(host: Host, ranks: int, binding: str) -> tuple[list[Share], int, str]:
    """Return a share for each rank, the number of threads that each computes on, and why they are
    not bound as requested, or ""."""
    unbound, threads = [Share([], [])] * ranks, max(1, host.usable // ranks)
    if binding == "none":
        return unbound, threads, ""
    if ranks > host.usable:
        return (
            unbound,
            threads,
            (
                f"{ranks} ranks share {host.usable} core(s), so they are not bound and "
                "each computes on one thread: pass a smaller -n unless this is a test"
            ),
        )
    if host.is_throttled:
        return (
            unbound,
            threads,
            (
                f"a quota of {host.quota:g} CPUs' time applies to {len(host.cores)} cores "
                "(cpu.max of the control group), so ranks are not bound: others with a quota may "
                "choose the same cores. Give the container a cpuset to bind ranks"
            ),
        )
    shares, parts = [], _divide(host.cores, ranks)
    for own in parts:
        nodes = {core.node for core in own}
        if binding == "numa":
            own = [core for core in host.cores if core.node in nodes]
        placed = nodes & host.memory if len(host.memory) > 1 else set()
        shares.append(Share(sorted(core.cpu for core in own), sorted(placed)))
    return shares, len(parts[0]), ""


def _divide(cores: list[Core], ranks: int) -> list[list[Core]]:
    """Return equally many cores for each rank; there are at most as many ranks as cores."""
    sizes = Counter(core.node for core in cores)
    guests = dict.fromkeys(sizes, 0)
    for _ in range(ranks):  # put each rank where the smallest share stays largest
        guests[max(sizes, key=lambda node: sizes[node] // (guests[node] + 1))] += 1
    within = min(sizes[node] // count for node, count in guests.items() if count)
    across = len(cores) // ranks
    if 4 * within < 3 * across:
        return [cores[rank * across : (rank + 1) * across] for rank in range(ranks)]
    parts = []
    for node, count in guests.items():
        own = [core for core in cores if core.node == node]
        parts += [own[i * len(own) // count :][:within] for i in range(count)]
    return parts


def parse_list(text: str) -> set[int]:
    """Return the numbers of a list such as "0-3,8"; an empty list for any other text."""
    found: set[int] = set()
    try:
        for part in text.strip().split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except ValueError:
        return set()
    return found


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
    return parse_list(read_text(file) or "")


# --- under plain torchrun -------------------------------------------------------------------------

_THREADS = "OMP_NUM_THREADS"


@functools.cache  # warn once
def warn_of_idle_cores() -> None:
    """Warn on the first rank of a host if torchrun's OMP_NUM_THREADS=1 leaves cores idle."""
    if os.environ.get("LOCAL_RANK") != "0" or not is_torchruns_choice(os.getppid()):
        return
    ranks, threads = int(os.environ["LOCAL_WORLD_SIZE"]), torch.get_num_threads()
    cores = read_host().usable
    if cores // ranks > threads:
        each = f"{threads} thread{'s' if threads > 1 else ''} each"
        warnings.warn(
            f"cores are idle: the {ranks} ranks of this host may use {cores} physical cores, but "
            f"compute on {each}, because torchrun sets {_THREADS}=1 where it is unset. Start the "
            f"script with `python -m zshard run -n {ranks}` in place of torchrun, or set "
            f"{_THREADS}={cores // ranks}; {_THREADS}=1 keeps one thread and silences this warning",
            RuntimeWarning,
            stacklevel=stacklevel(),
        )


def is_torchruns_choice(parent: int, root: Path = ROOT) -> bool:
    """Return whether torchrun, this process's parent, set OMP_NUM_THREADS=1: its own environment,
    as the kernel keeps it, then lacks the variable."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get(_THREADS) != "1":
        return False
    started_with = read_text(root / f"proc/{parent}/environ")
    return started_with is not None and f"\0{_THREADS}=" not in f"\0{started_with}"
