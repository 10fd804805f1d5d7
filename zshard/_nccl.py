"""libnccl: where it lies, which one it is, and its end.

The one idea: torch's wheels with CUDA bring NCCL as a package of its own (nvidia.nccl). torch has
usually loaded it; where it has not, this package says where the file is. All else is in C.
"""

from __future__ import annotations

import atexit
import importlib.util
from pathlib import Path

from zshard import _core

_known: tuple[str, str] | None = None


def library() -> tuple[str, str]:
    """NCCL's version ("2.28.9") and file; opens the library on first use.

    ZSHARD_NCCL_LIB (a path) goes before the one that torch has loaded, that before the one of
    Python's nvidia.nccl package, and the system's comes last. Raises NotImplementedError where
    there is none, or one that is too old (before 2.14).
    """
    global _known
    if _known is None:
        _known = _core.nccl_library(_packaged())
        # Never from a destructor: what NCCL itself needs may be gone by then.
        atexit.register(_core.nccl_abort, "the interpreter has ended")
    return _known


def _packaged() -> str | None:
    """The file of Python's nvidia.nccl package."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # no nvidia at all
        return None
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        file = Path(folder) / "lib" / "libnccl.so.2"
        if file.exists():
            return str(file)
    return None
