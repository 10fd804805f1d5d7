"""The build's note next to the extension. setup.py also runs this file, without torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["digest", "note_on"]

_COMPILED = {".c", ".h", ".cpp", ".hpp", ".cu", ".cuh"}


def note_on(extension: str | Path) -> Path:
    """Return the path of the note on the extension: the version of torch, and if it lies beside
    its sources, their digest."""
    return Path(extension).with_suffix(".built")


def digest(clone: Path) -> str:
    """Return a digest of what the extension is compiled from."""
    total = hashlib.sha256()
    for folder in ("csrc", "cuda"):
        for path in sorted((clone / folder).rglob("*")):
            if path.suffix in _COMPILED:
                total.update(f"{path.relative_to(clone)}\0".encode())
                total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()
