"""Shards as plain tensors, for zshard's own code, which knows what it holds.

The rest of the guard builds on this file, so it imports only the guard's list of rules.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, _guards

from zshard import _core
from zshard.guard.rules import Operation as Operation
from zshard.units.shards import Part

_own_grad = vars(torch._C.TensorBase)["grad"].__get__


class GuardedTensor(Tensor):
    """Base of the tensor classes whose operations torch dispatches to zshard."""


class plain(contextlib.ContextDecorator):
    """Context manager or decorator that refuses no operation on shards, and guards no result."""

    def __enter__(self) -> None:
        self._switch = torch._C.DisableTorchFunctionSubclass()
        self._switch.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._switch.__exit__(*error)

    def _recreate_cm(self) -> plain:
        return plain()  # recursive calls and threads each need their own


def is_tracing() -> bool:
    """Return whether torch traces for the compiler on this thread, not as is_compiling() on any."""
    return _guards.TracingContext.try_get() is not None


def guarded(call: Operation) -> Operation:
    """Return a script's function with the guard on, although code within plain() calls it."""

    @functools.wraps(call)
    def called() -> object:
        with torch._C._EnableTorchFunction():
            return call()

    return called


def run_plain(func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on this rank's elements; the result is not guarded."""
    with plain():
        return func(*args, **kwargs)


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's elements of a sharded tensor as a plain tensor, which shares memory with
    it and is not guarded; any other tensor as it is. Does not communicate."""
    if not isinstance(tensor, GuardedTensor):
        return tensor
    _core.apply_pending(tensor, True)
    with plain():
        return tensor.detach()


def grads_of(params: Iterable[Tensor]) -> list[Tensor | None]:
    """Return each `.grad`, unguarded. Reading the attribute within plain() multiplies the gradients
    by what is pending for them (docs/design/clipping.md); this leaves it pending."""
    with plain():
        return [_own_grad(param) for param in params]


def guard_like(result: Tensor, tensor: Tensor) -> Any:
    """Guard a plain tensor as `tensor` is, if it has the shape of its shard; return it."""
    part = _core.slice_part(tensor)
    return result if part is None else _core.mark_slice(result, part)


def slices_among(values: Iterable[object]) -> list[Part]:
    """Return the Parts of the shards among values, and in lists and dicts of them."""
    parts: list[Part] = []
    for value in values:
        if isinstance(value, Tensor):
            part = _core.slice_part(value)
            parts += [] if part is None else [part]
        elif isinstance(value, list | tuple):
            parts += slices_among(value)
        elif isinstance(value, dict):
            parts += slices_among(value.values())
    return parts
