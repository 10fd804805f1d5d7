"""safetensors refuses shards, of which it would write one rank's.

It reads a tensor's memory by its address, which the guard cannot refuse. So it is
told which tensors are shards, in the function that all its ways to write go through.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from zshard import _core
from zshard._errors import ShardError
from zshard.guard.words import written_to_file

__all__ = ["FLATTENING", "install"]

FLATTENING = ("_flatten_as_ptr", "_flatten")
"""Functions of safetensors.torch that save() and save_file() call; the second before 0.8."""


def install() -> None:
    """Have safetensors refuse shards, if it is installed. Idempotent."""
    try:
        library = importlib.import_module("safetensors.torch")
    except ImportError:
        return
    for name in FLATTENING:
        flatten = getattr(library, name, None)
        if flatten is not None and not hasattr(flatten, "__wrapped__"):
            setattr(library, name, _refusing(flatten))


def _refusing(flatten: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(flatten)
    def checked(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        for value in tensors.values() if isinstance(tensors, dict) else ():
            part = _core.slice_part(value)
            if part is not None:
                raise ShardError(written_to_file("a safetensors file", part))
        return flatten(tensors, *args, **kwargs)

    return checked
