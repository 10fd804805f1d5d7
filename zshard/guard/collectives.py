"""A script's own collectives: refused for shards, such as `dist.all_reduce(p.grad)`; and a sign
that what the script has written in place is complete.

The ranks' shards of a parameter are different elements, often of the same shape, so a
collective would mix or overwrite them without a word. torch's collectives do not ask tensor
subclasses, but all of them check their arguments by a few functions, which are extended here.

One rank alone may evaluate weights that all ranks have written in place (a moving average), once
the others have written theirs. They say so where they come to wait for it: in a barrier, or another
collective of all ranks.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from zshard._errors import ShardError
from zshard.guard.slices import slices_among
from zshard.guard.words import refused_collective
from zshard.units.units import State

__all__ = ["install", "tell_of_collectives"]

_CHECKS = ("_check_single_tensor", "_check_tensor_list")
_MEETINGS = frozenset(
    (
        *("barrier", "monitored_barrier", "all_reduce", "all_gather", "all_gather_into_tensor"),
        *("all_gather_object", "reduce_scatter", "reduce_scatter_tensor"),
        *("all_to_all", "all_to_all_single"),
    )
)
"""The functions of torch.distributed in which all ranks of a group wait for each other."""

_COLLECTIVES = _MEETINGS | {
    *("broadcast", "broadcast_object_list", "reduce", "gather", "gather_object", "scatter"),
    "scatter_object_list",
}
"""Those that all ranks of a group call."""


def install() -> None:
    """Have torch.distributed refuse shards. Idempotent."""
    for name in _CHECKS:
        check = getattr(distributed_c10d, name)
        if not hasattr(check, "__wrapped__"):
            setattr(distributed_c10d, name, _refusing(check))
    ask = distributed_c10d._rank_not_in_group
    if not hasattr(ask, "__wrapped__"):
        setattr(distributed_c10d, ask.__name__, _telling(ask))


def _refusing(check: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(check)
    def checked(param: Any, *args: Any, **kwargs: Any) -> None:
        check(param, *args, **kwargs)
        parts = slices_among([param])
        if parts:
            raise ShardError(refused_collective(parts[0]))

    return checked


_models: weakref.WeakKeyDictionary[State, int] = weakref.WeakKeyDictionary()
"""A unit of each model whose ranks read each other's shards, and the thread that has made it. Other
threads (of an asynchronous checkpoint, say) have collectives of their own, at any time."""


def tell_of_collectives(state: State) -> None:
    """Have a new model told of the script's own collectives of all ranks. `state`: of its root."""
    if state.comms.shard_group.transport == "shm":
        _models[state] = threading.get_ident()


def _telling(ask: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """What each collective calls first."""

    @functools.wraps(ask)
    def asked(group: Any) -> bool:
        frame = sys._getframe(1)
        if _models and frame.f_code.co_name in _COLLECTIVES and _is_of_all(group):
            waits = frame.f_code.co_name in _MEETINGS and not frame.f_locals.get("async_op")
            for state, thread in list(_models.items()):
                engine = state.unit.engine
                if thread == threading.get_ident():
                    engine.meet() if waits else engine.complete_writes()
        return ask(group)

    return asked


def _is_of_all(group: Any) -> bool:
    everyone = group is None or group is dist.GroupMember.WORLD
    return everyone or dist.get_world_size(group) == dist.get_world_size()
