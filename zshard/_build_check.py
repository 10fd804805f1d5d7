"""Refuse to import zshard unless its extension was built for this Python, this torch and, in a
clone, these sources.

Runs before the extension is imported. Torch keeps its C++ interface within a minor version; with
another one, loading the extension fails with undefined symbols, or crashes later. Sources of
another commit may mean other things by the same calls.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

import torch

from zshard._built import digest, note_on

__all__ = ()

_BUILD = "in a clone, run `make build` or `pip install --no-build-isolation .`"


def _check() -> None:
    """Raise ImportError unless the build saw this Python, torch's minor version and the sources."""
    # In this folder: an import would also find that of another clone, installed editable.
    spec = PathFinder.find_spec("zshard._core", [str(Path(__file__).parent)])
    note = note_on(spec.origin) if spec is not None and spec.origin else None
    if note is None or not note.exists():
        python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
        raise ImportError(f"zshard's extension is not built for {python}: {_BUILD}")
    version, *sources = note.read_text().split()
    if _minor(torch.__version__) != _minor(version):
        raise ImportError(
            f"zshard was built with torch {version}, but torch {torch.__version__} is installed "
            f"({torch.__file__}): install torch {_minor(version)} "
            f"(pip install 'torch=={_minor(version)}.*'), or build zshard again with the installed "
            f"torch ({_BUILD})"
        )
    clone = note.parents[1]
    if sources and (clone / "csrc").exists() and sources != [digest(clone)]:
        raise ImportError(
            f"the C sources in {clone} have changed since zshard's extension was built: build it "
            f"again ({_BUILD})"
        )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


_check()
