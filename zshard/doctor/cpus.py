"""What this host's CPUs are, for `python -m zshard doctor`.

What is printed is what `python -m zshard run` divides among ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from zshard.run.cgroups import ROOT, read_text
from zshard.run.shares import as_list
from zshard.run.topology import Topology, read_topology

_BF16 = ("amx_bf16", "avx512_bf16")  # x86, best first
_ARM = ("sve", "svebf16", "bf16", "sme")


def facts(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each line."""
    yield "CPUs", describe(read_topology(root))
    yield "bf16", bf16(read_text(root / "proc/cpuinfo") or "")


def describe(topology: Topology) -> str:
    """Return the counts of a host in words."""
    counts = [
        _count(topology.sockets, "socket"),
        _count(topology.nodes, "NUMA node"),
        _count(topology.physical, "physical core"),
        _count(topology.hyperthreads, "hyperthread"),
    ]
    cpus = as_list(sorted(core.cpu for core in topology.cores))
    usable = f"usable: {_count(topology.usable, 'core')} (CPUs {cpus}"
    if topology.is_throttled:
        usable += f", within a quota of {topology.quota:g} CPUs' time"
    return f"{', '.join(counts)}; {usable})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def bf16(cpuinfo: str) -> str:
    """Return the instructions for bfloat16 that a /proc/cpuinfo lists."""
    found = re.search(r"^(flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    flags = found[2].split() if found else []
    if found and found[1] == "Features":
        names = [name for name in _ARM if name in flags]
        has_bf16 = any("bf16" in name for name in names)
    else:
        names = [name for name in _BF16 if name in flags][:1]
        has_bf16 = bool(names)
    if has_bf16:
        return " ".join(names)
    also = f" ({' '.join(names)})" if names else ""
    return f"none{also}: the CPU has no bfloat16 instructions, so bf16 saves memory, not time"
