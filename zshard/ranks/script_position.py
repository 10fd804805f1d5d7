"""Where this rank's script is, for messages: its own, and those of the ranks that wait for it.

A rank that waits in vain asks, over c10d by the process group's store and over shm by
a number in shared memory, and a thread of each process answers there with the line of the script
that its main thread is at: even while that is in a torch collective, of which zshard knows nothing.
The thread looks for a question once a second, and does nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from zshard import _core

__all__ = ["PublicCall", "own_collective", "place_of", "watch", "watch_shm"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

EVERY = 1.0  # seconds
PATIENCE = timedelta(seconds=5)  # with the store
_ASKED, _ANSWER = "zshard/asked", "zshard/at/{}/{}"  # as in torch_c10d.cpp
_LIBRARIES = tuple(
    os.path.dirname(module.__file__ or "") + os.sep for module in (torch, sys.modules["zshard"])
)
_COLLECTIVES = os.path.dirname(dist.__file__ or "") + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep
_WRAPPERS = {"decorate_context", "wrapper", "inner", "checked", "called", "_fn", "compile_wrapper"}
_DECORATORS = os.sep + "_contextlib.py"  # torch.no_grad()'s, whose frame has that name since 2.15
_NOWHERE = "outside its script"
_CALLS = {"__call__", "_call_impl", "_wrapped_call_impl", "call_guarded"}


class PublicCall:
    """Context manager, or decorator: what is exchanged within it is part of this public call, such
    as "save()", for messages, and other ranks may not be in another one. The outermost one counts.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._is_outermost = _core.begin_call(self._name)

    def __exit__(self, *error: Any) -> None:
        if self._is_outermost:
            _core.end_call()

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with PublicCall(self._name):
                return function(*args, **kwargs)

        return called


class _WatchedShm:
    """A shm transport, which asks by itself."""

    def __init__(self, comm: _core.Comm, group: Any) -> None:
        self.comm = comm
        self.groups = [weakref.ref(group)]

    def look(self) -> None:
        if _core.is_asked(self.comm):
            _core.tell_place(self.comm, _own_place())


class _Watched:
    """A c10d transport, and the store by which its ranks ask each other."""

    def __init__(self, comm: _core.Comm, group: Any, own: Any) -> None:
        store = dist.distributed_c10d._world.pg_map[own][1]
        # The script may wait for the store as well, on its own connection.
        self.store = store.clone() if hasattr(store, "clone") else store
        self.store.set_timeout(PATIENCE)
        self.comm = comm
        self.groups = [weakref.ref(group), weakref.ref(own)]
        self.answered = 0

    def look(self) -> None:
        asked = self.store.add(_ASKED, 0)
        if asked == self.answered:
            return
        self.answered = asked
        waits = "w" if self.comm.is_waiting else "-"
        self.store.set(_ANSWER.format(asked, self.comm.rank), f"{waits}{_own_place()}")


_watched: list[_Watched | _WatchedShm] = []
_parents: list[_Watched | _WatchedShm] = []
_lock = threading.Lock()
_stop = threading.Event()
_thread: threading.Thread | None = None


def watch(comm: _core.Comm, group: Any, own: Any) -> None:
    """Answer questions of the ranks of `comm`, the c10d transport of `group` over zshard's `own`,
    until one of these groups is destroyed."""
    with contextlib.suppress(RuntimeError, NotImplementedError):  # a store of another kind
        _add(_Watched(comm, group, own))


def watch_shm(comm: _core.Comm, group: Any) -> None:
    """The same for the shm transport of `group`."""
    _add(_WatchedShm(comm, group))


def _add(one: _Watched | _WatchedShm) -> None:
    global _thread
    with _lock:
        _watched.append(one)
        if _thread is None:
            _stop.clear()
            _thread = threading.Thread(target=_run, name="zshard-where", daemon=True)
            _thread.start()


def forget_dead() -> None:
    """Hold no transport any more whose process group the script has destroyed."""
    with _lock:
        _watched[:] = [one for one in _watched if _is_alive(one)]


def _is_alive(one: _Watched | _WatchedShm) -> bool:
    return all(group() in dist.distributed_c10d._world.pg_map for group in one.groups)


def _run() -> None:
    while not _stop.wait(EVERY) and _look():
        pass


def _look() -> bool:
    """Answer the questions that there are. Return whether others may follow."""
    global _thread
    forget_dead()
    with _lock:
        if not _watched:
            _thread = None
            return False
        these = list(_watched)
    for one in these:
        try:
            one.look()
        except Exception:  # the process that has the store has ended
            with _lock, contextlib.suppress(ValueError):
                _watched.remove(one)
    return True


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


def _here() -> str:
    """Where this thread's script is; on a thread of torch's, where the main thread's is."""
    caller = sys._getframe().f_back  # what calls the core
    place = _NOWHERE if caller is None else place_of(caller)
    return _own_place() if place == _NOWHERE else place


def _own_place() -> str:
    frame = _main_frame()
    return place_of(frame) if frame is not None else ""


def place_of(frame: FrameType) -> str:
    """Return what a thread is at, as "in barrier() at train.py:44 (main)": the first call of torch
    or zshard that the script has not returned from, and the script's line."""
    place, own, call = None, None, ""
    for each in reversed(list(_outwards(frame))):  # from the outermost
        code = each.f_code
        if code.co_filename.startswith(_LIBRARIES):
            decorates = code.co_filename.endswith(_DECORATORS)
            if place is None or decorates or code.co_name in _WRAPPERS:
                continue
            call = "a forward" if code.co_name in _CALLS else f"{code.co_name}()"
            break
        if "-packages" in code.co_filename:
            place = each
        elif not code.co_filename.startswith((_STANDARD, "<")):
            place = own = each
    if place is None:
        return _NOWHERE
    at = f"at {_line_of(place)}"
    if own is not None and own is not place:  # a trainer is between
        at += f", from {_line_of(own)}"
    return f"in {call} {at}" if call else at


def _line_of(frame: FrameType) -> str:
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} ({code.co_name})"


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


_core.on_place(_here)
