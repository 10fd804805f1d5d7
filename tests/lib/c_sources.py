"""Paths of the sources in csrc/, for tests that compile some of them.

    compile_c(target, [PROGRAM, *sources("status.c", "shm*.c")], flags)

Names are unique in csrc/ (test_c_rules.py), so a test names a file and not its folder.
"""

from __future__ import annotations

import functools
import subprocess
import sysconfig
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"
HEADERS = sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".hpp"))
INCLUDES = [f"-iquote{CSRC}"]
"""Flags that let a compiler find them by #include "unit/unit.h"."""


SHM = [
    "status.c",
    "clock.c",
    "memory.c",
    "profile.c",
    "log.c",
    "device.c",
    "comm.c",
    "round.c",
    "fingerprint.c",
    "where.c",
    "script.c",
    "comm_self.c",
    "comm_shm.c",
    "file.c",
    "mappings.c",
    "shm*.c",
]
"""Sources of the transport "shm"."""

TURNS = ["turn.c", "turn_text.c", "agree.c"]
"""Further sources of transports that exchange turns."""


def source(name: str) -> Path:
    """Return the path of the file of this name; FileNotFoundError if there is none."""
    return sources(name)[0]


def sources(*names: str) -> list[Path]:
    """Return the paths of files, by name or pattern; FileNotFoundError for a pattern without a
    match."""
    found = [sorted(CSRC.rglob(name)) for name in names]
    for name, paths in zip(names, found, strict=True):
        if not paths:
            raise FileNotFoundError(f"no {name} in {CSRC} or its folders")
    return [path for paths in found for path in paths]


# --- the objects of the last release build, and their symbols ---------------------------------------

ROOT = Path(__file__).resolve().parents[2]

Symbols = list[tuple[str, str]]
"""(kind, name), as nm tells them: "U" is needed, a capital of DEFINED is defined for others."""

DEFINED = (
    "TDBRC"  # Weak and unique ones (W, V, u) are templates and inline statics of torch's headers.
)


def release_objects() -> dict[str, Path]:
    """Return the objects by the names of their sources; skips the test if there are none."""
    import pytest

    found = _release_objects()
    if not found:
        pytest.skip("no release build here")
    sources = {path.name for path in (ROOT / "csrc").rglob("*")}
    return {name: path for name, path in found.items() if name in sources}


def built(*names: str) -> list[Path]:
    """Return these sources' objects of the last release build, for compile_c to link: loops compile
    for half a minute. Sources that have changed since, or were not built, are returned themselves."""
    objects = _release_objects()
    return [
        made if (made := objects.get(path.name)) and _is_fresh(made) else path
        for path in sources(*names)
    ]


def _is_fresh(made: Path) -> bool:
    """Return whether an object is newer than its sources, which the compiler has listed."""
    _, _, listed = made.with_suffix(".d").read_text().partition(":")
    inputs = [ROOT / name for name in listed.replace("\\\n", " ").split()]
    return all(each.exists() and each.stat().st_mtime < made.stat().st_mtime for each in inputs)


def _release_objects() -> dict[str, Path]:
    import torch

    tag = f"objects-{sysconfig.get_config_var('SOABI')}-torch{torch.__version__}-release"
    return {path.name.removesuffix(".o"): path for path in (ROOT / "build" / tag).glob("*.o")}


def symbols(path: Path, *options: str) -> Symbols:
    """Return the symbols of a library or an object."""
    return _symbols([path], *options)[path]


def _symbols(paths: list[Path], *options: str) -> dict[Path, Symbols]:
    command = ["nm", "-A", *options, *map(str, paths)]
    listed = subprocess.run(command, text=True, capture_output=True, check=True)
    found: dict[Path, Symbols] = {path: [] for path in paths}
    for line in listed.stdout.splitlines():
        path, _, rest = line.partition(":")
        found[Path(path)].append(tuple(rest.split()[-2:]))  # type: ignore[arg-type]
    return found


@functools.cache
def symbols_by_source() -> dict[str, Symbols]:
    """Return the symbols of each source's object."""
    objects = release_objects()
    found = _symbols(list(objects.values()))
    return {source: found[path] for source, path in objects.items()}
