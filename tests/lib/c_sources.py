"""Where the sources of csrc/ lie, for tests that compile some of them.

    compile_c(target, [PROGRAM, *sources("status.c", "shm*.c")], flags)

Names are unique in csrc/ (test_c_rules.py), so a test names a file and not its folder.
"""

from __future__ import annotations

from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"
HEADERS = sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".hpp"))
INCLUDES = [f"-iquote{CSRC}"]
"""What lets a compiler find them by #include "unit/unit.h"."""


SHM = [
    "status.c",
    "memory.c",
    "profile.c",
    "device.c",
    "comm.c",
    "round.c",
    "fingerprint.c",
    "script.c",
    "comm_self.c",
    "comm_shm.c",
    "file.c",
    "shm*.c",
]
"""What the transport "shm" is compiled of."""


def source(name: str) -> Path:
    """The path of the file of this name; FileNotFoundError if there is none."""
    return sources(name)[0]


def sources(*names: str) -> list[Path]:
    """The paths of files, by name or pattern; FileNotFoundError for one that no file has."""
    found = [sorted(CSRC.rglob(name)) for name in names]
    for name, paths in zip(names, found, strict=True):
        if not paths:
            raise FileNotFoundError(f"no {name} in {CSRC} or its folders")
    return [path for paths in found for path in paths]
