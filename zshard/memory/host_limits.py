"""Memory that this process can still allocate under the limits of the host and its cgroups.

Reclaimable page cache counts as free, as in the kernel's MemAvailable. A limit that is not set or
cannot be read does not count. Nor do a process's own limits (ulimit): what exceeds those is an
error of the allocation, and no process is killed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_UNLIMITED = 1 << 60  # bytes; version 1 has no word for "unlimited" and reports a number above this

_HOST, _CGROUP = "the host's MemAvailable", "the cgroup's limit"  # the sources, for messages
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
_V2 = ("memory.max", "memory.current", "inactive_file", "active_file")


class Sharing(NamedTuple):
    """The number of ranks that share the memory of a host and of a control group."""

    host: int = 1
    cgroup: int = 1


class Room(NamedTuple):
    """Bytes that a limit leaves to this rank; and the limit, for messages."""

    bytes: int
    source: str


def rooms(sharing: Sharing) -> list[Room]:
    """Return what the host's memory and the cgroup's limit leave to this rank."""
    return divided(left_on_host()[0], sharing)


def left_on_host() -> tuple[list[Room], str]:
    """Return what they leave to all ranks together, and a text that is equal for the processes in
    the control group."""
    in_cgroup, cgroup = room_of_cgroup()
    left = {_HOST: room_of_host(), _CGROUP: in_cgroup}
    return [Room(size, source) for source, size in left.items() if size is not None], cgroup


def divided(left: Iterable[Room], sharing: Sharing) -> list[Room]:
    """Return what is left to one of the ranks that share it."""
    ranks_of, shares = {_HOST: sharing.host, _CGROUP: sharing.cgroup}, []
    for room in left:
        ranks = ranks_of.get(room.source, 1)
        words = f", divided among its {ranks} ranks" if ranks > 1 else ""
        shares.append(Room(room.bytes // ranks, room.source + words))
    return shares


def room_of_host(root: Path = Path("/")) -> int | None:
    """Return the host's available memory in bytes, without swapping; None if the kernel does not
    report it."""
    text = read_text(root / "proc/meminfo")
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text or "", re.MULTILINE)
    return 1024 * int(match[1]) if match else None


def room_of_cgroup(root: Path = Path("/")) -> tuple[int | None, str]:
    """Return the bytes that the tightest of this process's cgroups leaves (None: no limit), and a
    text that is equal for the processes in that cgroup."""
    tightest: tuple[int | None, str] = None, ""
    for group in ControlGroup.all("memory", root):
        names = _V1 if group.is_old else _V2
        limit, usage = _number(group.read(names[0])), _number(group.read(names[1]))
        if limit is None or usage is None or limit >= _UNLIMITED:
            continue
        stat = dict(re.findall(r"^(\w+) (\d+)$", group.read("memory.stat"), re.MULTILINE))
        cache = sum(int(stat.get(name, 0)) for name in names[2:])
        left = max(limit - max(usage - cache, 0), 0)
        if tightest[0] is None or left < tightest[0]:
            tightest = left, str(group.folder.stat().st_ino)
    return tightest


class ControlGroup(NamedTuple):
    """A control group of this process. is_old: of version 1."""

    folder: Path
    is_old: bool

    def read(self, name: str) -> str:
        """Return what is in a file of it; "" if it cannot be read."""
        return read_text(self.folder / name) or ""

    @staticmethod
    def all(controller: str, root: Path = Path("/")) -> Iterator[ControlGroup]:
        """Yield this process's control groups of a controller, innermost first."""
        for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            top = root / "sys/fs/cgroup" / (controller if controllers else "")
            folder = top / path.lstrip("/")
            while True:
                yield ControlGroup(folder, bool(controllers))
                if folder == top or top not in folder.parents:
                    break
                folder = folder.parent


class Resident(NamedTuple):
    """Bytes of a process's memory that are in RAM: current and peak."""

    now: int
    peak: int


def resident(root: Path = Path("/")) -> Resident | None:
    """Return this process's bytes in RAM; None if the kernel does not report them."""
    text = read_text(root / "proc/self/status") or ""
    kib = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", text, re.MULTILINE))
    if len(kib) < 2:
        return None
    now, peak = 1024 * int(kib["VmRSS"]), 1024 * int(kib["VmHWM"])
    return Resident(now, max(now, peak))


def room_of_mappings(root: Path = Path("/")) -> int | None:
    """Return how many more memory mappings this process may have; None if unknown."""
    limit = _number(read_text(root / "proc/sys/vm/max_map_count") or "")
    maps = read_text(root / "proc/self/maps")
    return None if limit is None or maps is None else max(limit - maps.count("\n"), 0)


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdigit() else None


def read_text(path: Path) -> str | None:
    """Return what is in a file; None if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return None
