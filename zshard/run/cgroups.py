"""The control groups that this process is in.

A limit may be set on any group above the process's own, so all of them are walked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def groups(controller: str, root: Path = ROOT) -> Iterator[tuple[Path, bool]]:
    """Yield the directories of this process's groups of a controller, innermost first, and whether
    each is of version 1."""
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = top / path.lstrip("/")
        while True:
            yield folder, bool(controllers)
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return how many CPUs' time the tightest group allows; None: no limit."""
    found = [_quota_of(folder, first) for folder, first in groups("cpu", root)]
    return min((quota for quota in found if quota is not None), default=None)


def _quota_of(folder: Path, version_1: bool) -> float | None:
    if version_1:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = [(read_text(folder / name) or "").strip() for name in names]
    else:
        words = (read_text(folder / "cpu.max") or "").split()
    if len(words) != 2 or not all(word.isdigit() for word in words):  # "max", "-1", no file
        return None
    quota, period = map(int, words)
    return quota / period if quota and period else None


def read_text(path: Path) -> str | None:
    """Return what is in a file; None if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return None
