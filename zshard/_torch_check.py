"""Refuse to import zshard with a torch other than the one that it was compiled against.

Runs before the extension is imported. Torch keeps its C++ interface within a minor version; with
another one, loading the extension fails with undefined symbols, or crashes later.

The build writes zshard/_built_with.py beside the extension (setup.py).
"""

from __future__ import annotations

import torch

__all__: list[str] = []

_BUILD = "in a clone, run `make build` or `pip install --no-build-isolation .`"


def _check() -> None:
    """Raise ImportError unless torch has the minor version that the build saw."""
    try:
        from zshard._built_with import TORCH
    except ModuleNotFoundError:
        raise ImportError(f"zshard's extension is not built: {_BUILD}") from None
    if _minor(torch.__version__) != _minor(TORCH):
        raise ImportError(
            f"zshard was built with torch {TORCH}, but torch {torch.__version__} is installed "
            f"({torch.__file__}): install torch {_minor(TORCH)} "
            f"(pip install 'torch=={_minor(TORCH)}.*'), or build zshard again with the installed "
            f"torch ({_BUILD})"
        )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


_check()
