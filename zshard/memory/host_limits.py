"""How much more memory this process can allocate under the limits of the host, its cgroups and the
process itself.

Reclaimable page cache counts as free, as in the kernel's MemAvailable. A limit that is not set or
cannot be read does not count.
"""

from __future__ import annotations

import re
import resource
from pathlib import Path
from typing import NamedTuple

from zshard.run.cores import ROOT, groups, read_text

_UNLIMITED = 1 << 60  # bytes; version 1 has no word for "unlimited" and reports a number above this

_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
_V2 = ("memory.max", "memory.current", "inactive_file", "active_file")


def shared_by(ranks: int) -> str:
    """Return the phrase for a limit that several ranks share; "" for one."""
    return f", divided among its {ranks} ranks" if ranks > 1 else ""


class Allowance(NamedTuple):
    """Memory left under a limit.

    bytes: how much. source: the limit, for messages. key: equal for processes that share it.
    """

    bytes: int
    source: str
    key: str


def room_of_host(root: Path = ROOT) -> Allowance | None:
    """Return the host's available memory, without swapping; None if the kernel does not report
    it."""
    text = read_text(root / "proc/meminfo")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text or "", re.MULTILINE)
    return (
        Allowance(1024 * int(found[1]), "the host's memory (MemAvailable)", "") if found else None
    )


def room_of_cgroup(root: Path = ROOT) -> Allowance | None:
    """Return the memory that the tightest of this process's cgroups leaves; None: no limit."""
    found = [_room_of(folder, _V1 if first else _V2) for folder, first in groups("memory", root)]
    rooms = [room for room in found if room]
    return min(rooms, default=None)


def room_of_process(name: str) -> int | None:
    """Return the bytes left under this process's RLIMIT_DATA or RLIMIT_AS; None: no limit."""
    soft, _ = resource.getrlimit(getattr(resource, name))
    field = {"RLIMIT_DATA": "VmData", "RLIMIT_AS": "VmSize"}[name]
    found = re.search(rf"^{field}:\s+(\d+) kB", read_text(Path("/proc/self/status")) or "", re.M)
    if soft == resource.RLIM_INFINITY or found is None:
        return None
    return max(soft - 1024 * int(found[1]), 0)


class Resident(NamedTuple):
    """Bytes of a process's memory that are in RAM: current and peak."""

    now: int
    peak: int


def resident(root: Path = ROOT) -> Resident | None:
    """Return this process's bytes in RAM; None if the kernel does not report them."""
    text = read_text(root / "proc/self/status") or ""
    found = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", text, re.MULTILINE))
    if len(found) < 2:
        return None
    now, peak = 1024 * int(found["VmRSS"]), 1024 * int(found["VmHWM"])
    return Resident(now, max(now, peak))


def max_map_count(root: Path = ROOT) -> int | None:
    """Return how many memory mappings a process may have; None if unknown."""
    return _number(root / "proc/sys/vm/max_map_count")


def room_of_mappings(root: Path = ROOT) -> int | None:
    """Return how many more memory mappings this process may have; None if unknown."""
    limit = max_map_count(root)
    maps = read_text(root / "proc/self/maps")
    return None if limit is None or maps is None else max(limit - maps.count("\n"), 0)


def _room_of(folder: Path, names: tuple[str, str, str, str]) -> Allowance | None:
    limit, usage = _number(folder / names[0]), _number(folder / names[1])
    if limit is None or usage is None or limit >= _UNLIMITED:
        return None
    stat = dict(re.findall(r"^(\w+) (\d+)$", read_text(folder / "memory.stat") or "", re.MULTILINE))
    cache = sum(int(stat.get(name, 0)) for name in names[2:])
    room = max(limit - max(usage - cache, 0), 0)
    return Allowance(room, f"the cgroup's limit ({folder / names[0]})", str(folder.stat().st_ino))


def _number(path: Path) -> int | None:
    text = (read_text(path) or "").strip()
    return int(text) if text.isdigit() else None
