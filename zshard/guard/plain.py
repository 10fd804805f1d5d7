"""Shards as plain tensors: for zshard's own code, which knows what it has.

All that stands above uses this, so it imports nothing of the guard but its list.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from zshard import _core
from zshard.guard.rules import Operation
from zshard.units.shards import Part

__all__ = [
    "GuardedTensor",
    "Operation",
    "guard_like",
    "guarded",
    "plain",
    "run_plain",
    "slices_among",
    "to_local",
]


class GuardedTensor(Tensor):
    """The base of the classes of tensors that torch asks about each operation."""


class plain(contextlib.ContextDecorator):
    """Context manager, or decorator, in which no operation on a shard is refused, and no result is
    guarded."""

    def __enter__(self) -> None:
        self._switch = torch._C.DisableTorchFunctionSubclass()
        self._switch.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._switch.__exit__(*error)

    def _recreate_cm(self) -> plain:
        return plain()  # a decorated function that calls itself, or a thread: each has its own


def guarded(call: Operation) -> Operation:
    """Return a script's function such that it is guarded although plain() calls it."""

    @functools.wraps(call)
    def called() -> object:
        with torch._C._EnableTorchFunction():
            return call()

    return called


def run_plain(func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on this rank's elements, as they are; the result is not guarded."""
    with plain():
        return func(*args, **kwargs)


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's elements of a sharded tensor as a plain tensor, which shares memory with
    it and is not guarded; any other tensor as it is. Does not communicate."""
    if not isinstance(tensor, GuardedTensor):
        return tensor
    with plain():
        return tensor.detach()


def guard_like(made: Tensor, tensor: Tensor) -> Any:
    """Have a plain tensor guarded as `tensor` is, if it has the shape of its shard; return it."""
    part = _core.slice_part(tensor)
    return made if part is None else _core.mark_slice(made, part)


def slices_among(values: Iterable[object]) -> list[Part]:
    """Return the Parts of the shards among values, and in lists and dicts of them."""
    found: list[Part] = []
    for value in values:
        if isinstance(value, Tensor):
            part = _core.slice_part(value)
            found += [] if part is None else [part]
        elif isinstance(value, list | tuple):
            found += slices_among(value)
        elif isinstance(value, dict):
            found += slices_among(value.values())
    return found
