"""A script's own collectives: refused for shards, such as `dist.all_reduce(p.grad)`; and a sign
that what the script has written in place is complete.

The one idea: the ranks' shards of a parameter are different elements, often of the same shape, so a
collective would mix or overwrite them without a word. torch's collectives do not ask tensor
subclasses, but all of them check their arguments by a few functions, which are extended here.

One rank alone may evaluate weights that all ranks have written in place (a moving average), once
the others have written theirs. They say so where they come to wait for it: in a barrier, or another
collective of all ranks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from zshard._guard import slices_among
from zshard._guard_words import ShardError, refused_collective
from zshard._parts import complete_writes, has_written

__all__ = ["install"]

_CHECKS = ("_check_single_tensor", "_check_tensor_list")
_MEETINGS = frozenset(
    (
        *("barrier", "monitored_barrier", "broadcast", "broadcast_object_list", "reduce"),
        *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object"),
        *("gather", "gather_object", "scatter", "scatter_object_list", "reduce_scatter"),
        *("reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    )
)
"""The functions of torch.distributed that all ranks of a group call."""


def install() -> None:
    """Have torch.distributed refuse shards. Idempotent."""
    for name in _CHECKS:
        check = getattr(distributed_c10d, name)
        if not hasattr(check, "__wrapped__"):
            setattr(distributed_c10d, name, _refusing(check))
    ask = distributed_c10d._rank_not_in_group
    if not hasattr(ask, "__wrapped__"):
        setattr(distributed_c10d, ask.__name__, _completing(ask))


def _refusing(check: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(check)
    def checked(param: Any, *args: Any, **kwargs: Any) -> None:
        check(param, *args, **kwargs)
        parts = slices_among([param])
        if parts:
            raise ShardError(refused_collective(parts[0]))

    return checked


def _completing(ask: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """What each collective calls first."""

    @functools.wraps(ask)
    def asked(group: Any) -> bool:
        if has_written() and _is_meeting(sys._getframe(1).f_code.co_name, group):
            complete_writes()
        return ask(group)

    return asked


def _is_meeting(name: str, group: Any) -> bool:
    """Do all ranks call it?"""
    everyone = group is None or group is dist.GroupMember.WORLD
    return name in _MEETINGS and (everyone or dist.get_world_size(group) == dist.get_world_size())
