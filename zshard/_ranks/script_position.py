"""Where this rank's script is, for the ranks that wait for it over c10d.

The one idea: a rank that waits in vain asks by the process group's store, and a thread of each
process answers there with the line of the script that its main thread is at: even while that is in
a torch collective, of which zshard knows nothing. The thread looks for a question once a second,
and does nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from zshard import _core

__all__ = ["own_collective", "place_of", "watch"]

EVERY = 1.0  # seconds
PATIENCE = timedelta(seconds=5)  # with the store
_ASKED, _ANSWER = "zshard/asked", "zshard/at/{}/{}"  # as in torch_c10d.cpp
_LIBRARIES = tuple(
    os.path.dirname(module.__file__ or "") + os.sep for module in (torch, sys.modules["zshard"])
)
_COLLECTIVES = os.path.dirname(dist.__file__ or "") + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep
_WRAPPERS = {"decorate_context", "wrapper", "inner", "checked", "_fn", "compile_wrapper"}
_DECORATORS = os.sep + "_contextlib.py"  # torch.no_grad()'s, whose frame has that name since 2.15
_CALLS = {"__call__", "_call_impl", "_wrapped_call_impl", "call_guarded"}


class _Watched:
    """A transport, and the store by which its ranks ask each other."""

    def __init__(self, comm: _core.Comm, group: Any, own: Any) -> None:
        store = dist.distributed_c10d._world.pg_map[own][1]
        # The script may wait for the store as well, on its own connection.
        self.store = store.clone() if hasattr(store, "clone") else store
        self.store.set_timeout(PATIENCE)
        self.comm = comm
        self.groups = [weakref.ref(group), weakref.ref(own)]
        self.answered = 0

    def is_alive(self) -> bool:
        return all(group() in dist.distributed_c10d._world.pg_map for group in self.groups)

    def look(self) -> None:
        asked = self.store.add(_ASKED, 0)
        if asked == self.answered:
            return
        self.answered = asked
        waits = "w" if self.comm.is_waiting else "-"
        self.store.set(_ANSWER.format(asked, self.comm.rank), f"{waits}{_own_place()}")


_watched: list[_Watched] = []
_parents: list[_Watched] = []
_lock = threading.Lock()
_stop = threading.Event()
_thread: threading.Thread | None = None


def watch(comm: _core.Comm, group: Any, own: Any) -> None:
    """Answer questions of the ranks of `comm`, the c10d transport of `group` over zshard's `own`,
    until one of these groups is destroyed."""
    global _thread
    with contextlib.suppress(RuntimeError, NotImplementedError):  # a store of another kind
        one = _Watched(comm, group, own)
        with _lock:
            _watched.append(one)
            if _thread is None:
                _stop.clear()
                _thread = threading.Thread(target=_run, name="zshard-where", daemon=True)
                _thread.start()


def _run() -> None:
    global _thread
    while not _stop.wait(EVERY):
        with _lock:
            _watched[:] = [one for one in _watched if one.is_alive()]
            if not _watched:
                _thread = None
                return
            these = list(_watched)
        for one in these:
            try:
                one.look()
            except Exception:  # the process that has the store has ended
                with _lock:
                    _watched.remove(one)


def _end() -> None:
    _stop.set()
    thread = _thread
    if thread is not None:
        thread.join(EVERY)


def _forget() -> None:
    """In a forked child, which is no rank."""
    global _thread, _lock, _stop, _watched, _parents
    _thread, _lock, _stop = None, threading.Lock(), threading.Event()
    _watched, _parents = [], _watched  # whose connections are not the child's to close


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)


# --- what a place is called -----------------------------------------------------------------------


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _own_place() -> str:
    frame = _main_frame()
    return place_of(frame) if frame is not None else ""


def place_of(frame: FrameType) -> str:
    """Return what a thread is at, as "in barrier() at train.py:44 (main)": the first call of torch
    or zshard that the script has not returned from, and the script's line."""
    place, call = None, ""
    for each in reversed(list(_outwards(frame))):  # from the outermost
        code = each.f_code
        if code.co_filename.startswith(_LIBRARIES):
            decorates = code.co_filename.endswith(_DECORATORS)
            if place is None or decorates or code.co_name in _WRAPPERS:
                continue
            call = "a forward" if code.co_name in _CALLS else f"{code.co_name}()"
            break
        if not code.co_filename.startswith((_STANDARD, "<")) or "-packages" in code.co_filename:
            place = each
    if place is None:
        return "outside its script"
    at = (
        f"at {os.path.basename(place.f_code.co_filename)}:{place.f_lineno} ({place.f_code.co_name})"
    )
    return f"in {call} {at}" if call else at


def own_collective() -> str:
    """Return the collective of torch's that this process's main thread is in, as place_of() does;
    "" if it is in none."""
    frame = _main_frame()
    if frame is None or not frame.f_code.co_filename.startswith(_COLLECTIVES):
        return ""
    return place_of(frame)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
