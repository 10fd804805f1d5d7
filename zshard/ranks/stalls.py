"""A thread that answers, over c10d, whether this rank waits as the others do.

Its answers go through the process group's store; c10d_stall.c asks, and prints them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from zshard import _core

_EVERY = 1.0  # seconds between two checks for a request
_ASKED, _ANSWER = "zshard/asked", "zshard/at/{}/{}"  # must match torch_c10d.cpp
_ending = threading.Event()


def answer_stalls(comm: _core.Comm, group: dist.ProcessGroup, own: dist.ProcessGroup) -> None:
    """Answer ranks of `comm`, the c10d transport of `group` over zshard's group `own`, when they
    ask why this rank is late, until one of these groups is destroyed."""
    try:
        # A separate connection, as the script may also be waiting for the store.
        store: Any = distributed_c10d._world.pg_map[own][1]
        store = store.clone()
        store.set_timeout(timedelta(seconds=5))
    except (AttributeError, RuntimeError, NotImplementedError):  # a store of another kind
        return
    groups = [weakref.ref(group), weakref.ref(own)]
    thread = threading.Thread(
        target=_answer_stalls, args=(comm, store, groups), name="zshard-stalls", daemon=True
    )
    thread.start()
    atexit.register(_end, thread)


def _end(thread: threading.Thread) -> None:
    _ending.set()
    thread.join(_EVERY)


def _answer_stalls(
    comm: _core.Comm, store: Any, groups: list[weakref.ref[dist.ProcessGroup]]
) -> None:
    answered = 0
    with contextlib.suppress(Exception):  # the process with the store has exited
        while not _ending.wait(_EVERY):
            if any(group() not in distributed_c10d._world.pg_map for group in groups):
                return
            asked = store.add(_ASKED, 0)
            if asked != answered:
                answered = asked
                said = "w" if comm.is_waiting else "-not in a zshard collective"
                store.set(_ANSWER.format(asked, comm.rank), said)


def _in_child() -> None:
    """Reset the state in a forked child, which is not a rank."""
    global _ending
    _ending = threading.Event()


os.register_at_fork(after_in_child=_in_child)
