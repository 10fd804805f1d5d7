"""Refuse shards in a script's own collectives, such as `dist.all_reduce(p.grad)`.

The one idea: the ranks' shards of a parameter are different elements, often of the same shape, so a
collective would mix or overwrite them without a word. torch's collectives do not ask tensor
subclasses, but all of them check their arguments by two functions, which are extended here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed import distributed_c10d

from zshard._guard import slices_among
from zshard._guard_words import ShardError, refused_collective

__all__ = ["install"]

_CHECKS = ("_check_single_tensor", "_check_tensor_list")


def install() -> None:
    """Have torch.distributed refuse shards. Idempotent."""
    for name in _CHECKS:
        check = getattr(distributed_c10d, name)
        if not hasattr(check, "__wrapped__"):
            setattr(distributed_c10d, name, _refusing(check))


def _refusing(check: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(check)
    def checked(param: Any, *args: Any, **kwargs: Any) -> None:
        check(param, *args, **kwargs)
        parts = slices_among([param])
        if parts:
            raise ShardError(refused_collective(parts[0]))

    return checked
