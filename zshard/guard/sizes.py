"""What a slice says when it is asked for its size: this rank's, but the full one to initializers
and within a forward of its model.

Code that initializes asks for sizes to compute the range of its random numbers.
torch.nn.init and functions named reset_parameters get the full sizes. Of others it is remembered
that they asked: numbers that they pass to a random operation later may have been computed from this
rank's sizes, so that is refused. In a forward, every operation sees the full parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from zshard import _core
from zshard.guard.rules import SIZES
from zshard.guard.slices import Handler, plain, run_plain
from zshard.units.shards import Part, asked_for_size

__all__ = ["HANDLERS", "has_told", "is_from_init", "is_from_torch"]

_INIT = torch.nn.init.__name__
_RESETS = frozenset(("reset_parameters", "_reset_parameters"))
_BETWEEN = (torch._tensor.__name__, torch.overrides.__name__)  # torch's way to the guard
_GUARD = __name__.rpartition(".")[0]

_LIBRARIES = ("torch", "zshard")  # they know what a shard's size is


def has_told(part: Part) -> bool:
    """Return whether a script has asked for this rank's size of the parameter."""
    return part.root in asked_for_size


def is_from_init() -> bool:
    """Return whether the operation that the guard is asked about was called by torch.nn.init."""
    return _module_of(_caller()) == _INIT


def is_from_torch() -> bool:
    """Return whether what is going on is a module of torch's own that initializes itself."""
    frame = _caller()
    while frame is not None and _module_of(frame) in (_INIT, *_BETWEEN):
        frame = frame.f_back
    return _module_of(frame).partition(".")[0] == "torch"


def _size(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    part = _core.slice_part(args[0])
    if part is None:
        return run_plain(func, args, kwargs)
    if part.is_in_forward():
        return _full_size(part, func, args, kwargs)
    asker = _caller()
    module = _module_of(asker)
    if module == _INIT or (asker is not None and asker.f_code.co_name in _RESETS):
        return _full_size(part, func, args, kwargs)
    if func not in _COUNTS and module.partition(".")[0] not in _LIBRARIES:
        asked_for_size.add(part.root)
    return run_plain(func, args, kwargs)


def _full_size(
    part: Part, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    with plain():
        return func(torch.empty(part.shape, device="meta"), *args[1:], **kwargs)


_COUNTS = (Tensor.numel, Tensor.nelement)  # from which nobody computes a range


def _caller() -> FrameType | None:
    """Who has called the operation: the innermost frame that is neither the guard's nor torch's way
    to it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_between(_module_of(frame)):
        frame = frame.f_back
    return frame


def _is_between(module: str) -> bool:
    return module in _BETWEEN or module.startswith(_GUARD)


def _module_of(frame: FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


HANDLERS: dict[Any, Handler] = {
    **{getattr(Tensor, name): _size for name in SIZES},
    Tensor.shape.__get__: _size,  # type: ignore[attr-defined]
}
