"""Operations of libraries that update one parameter, in a kernel of theirs.

An elementwise one is right on slices of the same elements; which ones are has to be
known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from zshard.guard.slices import Handler, refuse, run_plain, slices_among

__all__ = ["HANDLERS"]


def _update(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The update of slices of the same elements."""
    slices = [each for each in (*args, *kwargs.values()) if slices_among([each])]
    parts = slices_among(slices)
    if len({id(part.geometry) for part in parts}) > 1:
        return refuse(func, args, kwargs)
    with contextlib.ExitStack() as writes:
        for part, tensor in zip(parts, slices, strict=True):
            writes.enter_context(part.writing(tensor, func))
        return run_plain(func, args, kwargs)


HANDLERS: dict[Any, Handler] = {"bitsandbytes::optimizer_update_32bit": _update}
"""By the operation's name. That of 8-bit optimizers is none: their state has a scale per block."""
