"""A thread that answers other ranks when they ask where this rank is.

A rank that waits long asks: over shm by a word in shared memory, over c10d by the process group's
store. The thread looks for a question twice a second, so it answers even while the script hangs
elsewhere; csrc/comm/shm/shm_place.c and csrc/comm/c10d/c10d_stall.c ask, and print the answers.
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
from zshard._logger import drain
from zshard.ranks import where

_EVERY = 0.5  # seconds between two looks
_STORE_EVERY = 2  # looks between two requests to a store
_ASKED, _ANSWER = "zshard/asked", "zshard/at/{}/{}"  # must match torch_c10d.cpp


class _Watched:
    """A transport of this thread, the groups that it ends with, and the store over which its ranks
    ask each other; None: shm."""

    def __init__(self, comm: _core.Comm, groups: list[dist.ProcessGroup], store: Any) -> None:
        self.comm, self._store = comm, store
        self._groups = [weakref.ref(group) for group in groups]
        self._answered, self._thread = 0, threading.get_ident()

    def is_alive(self) -> bool:
        return all(group() in distributed_c10d._world.pg_map for group in self._groups)

    def look(self, asks_store: bool) -> None:
        """Answer if a rank has asked. Raises if the process with the store has exited."""
        if self._store is None:
            if self.comm.is_asked:
                self.comm.answer(where.script(self._thread))
        elif asks_store and (asked := self._store.add(_ASKED, 0)) != self._answered:
            self._answered = asked
            waits = "w" if self.comm.is_waiting else "-not in a zshard collective"
            self._store.set(
                _ANSWER.format(asked, self.comm.rank), f"{waits}\n{where.script(self._thread)}"
            )


class _Watch:
    """The transports whose ranks this process answers, and the thread that does so."""

    watched: list[_Watched]
    thread: threading.Thread | None

    def __init__(self) -> None:
        self.watched = []
        self.begin()

    def begin(self) -> None:
        """Begin; in a forked child, which is not a rank, anew."""
        self._parents = self.watched  # whose connections are not the child's to close
        self.watched, self.thread, self.ending = [], None, threading.Event()

    def run(self) -> None:
        """Answer until the process ends."""
        looks = 0
        while not self.ending.wait(_EVERY):
            looks += 1
            drain()  # the script may be waiting in C
            for each in list(self.watched):
                try:
                    is_alive = each.is_alive()
                    if is_alive:
                        each.look(looks % _STORE_EVERY == 0)
                except Exception:  # the process with the store has exited
                    is_alive = False
                if not is_alive:
                    with contextlib.suppress(ValueError):  # forget_dead() was faster
                        self.watched.remove(each)

    def end(self) -> None:
        self.ending.set()
        if self.thread is not None:
            self.thread.join(2 * _EVERY)


_watch = _Watch()


def answer_stalls(
    comm: _core.Comm, group: dist.ProcessGroup, inner: dist.ProcessGroup | None = None
) -> None:
    """Answer ranks of `comm`, the transport of `group`, when they ask why this rank is late, until
    the group is destroyed. inner: zshard's group, over which a c10d transport runs; None: shm."""
    store: Any = None
    if inner is not None:
        try:
            # A separate connection, as the script may also be waiting for the store.
            store = distributed_c10d._world.pg_map[inner][1]
            store = store.clone()
            store.set_timeout(timedelta(seconds=5))
        except (AttributeError, RuntimeError, NotImplementedError):  # a store of another kind
            return
    _watch.watched.append(_Watched(comm, [group] if inner is None else [group, inner], store))
    if _watch.thread is None:
        _watch.thread = threading.Thread(target=_watch.run, name="zshard-stalls", daemon=True)
        _watch.thread.start()
        atexit.register(_watch.end)


def forget_dead() -> None:
    """Drop the transports of groups that the script has destroyed, which free their memory."""
    _watch.watched[:] = [each for each in _watch.watched if each.is_alive()]


os.register_at_fork(after_in_child=_watch.begin)
