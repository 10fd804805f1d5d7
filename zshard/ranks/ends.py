"""The end of this rank: a normal exit, or an exception, whose text its peers get.

The transports register here what must be done then, so this file imports none of them. A forked
child is not a rank and reports nothing. Python prints what an exit handler raises but still exits
with status 0, so errors that no later call can raise go to fail().
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from zshard._logger import log


@dataclass
class _End:
    """The known facts about this process's end."""

    reported_pid: int = 0  # the process whose end is reported; 0: none yet
    failed: bool = False  # an exception ends this program, or a peer was lost,
    text: str = ""  # the exception's
    status_failed: bool = False  # fail() was called


_end = _End()


def watch(on_failure: Callable[[str], None], on_exit: Callable[[], None]) -> None:
    """Call `on_failure` with the text of an exception that ends this program, and `on_exit` when
    it exits. Only the first call counts."""
    if _end.reported_pid != 0:
        return
    _end.reported_pid = os.getpid()
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if is_reported():
            text = f"{kind.__name__}: {value}".encode(errors="replace").decode()
            _end.failed, _end.text = True, text
            on_failure(_end.text)  # before a handler that is slow, or raises
            log.info("an exception ends this rank: %s", _end.text)
        previous(kind, value, trace)

    sys.excepthook = hook
    atexit.register(on_exit)


def is_reported() -> bool:
    """Return whether this process is the rank, not a forked child of it."""
    return os.getpid() == _end.reported_pid


def has_failed() -> bool:
    """Return whether an exception ends this program, or a peer was lost."""
    return _end.failed


def note_failure() -> None:
    """Make has_failed() return True from now on."""
    _end.failed = True


def exit_text() -> str:
    """Return the text of the exception that ends this program; empty if there is none."""
    return _end.text


def fail(text: str) -> None:
    """Print an error. When all exit handlers have run, the process exits with status 1."""
    _end.status_failed = True
    print(text, file=sys.stderr, flush=True)


_P = ParamSpec("_P")
_T = TypeVar("_T")

_begun: weakref.WeakSet[Iterator[Any]] = weakref.WeakSet()


def may_stay_open(function: Callable[_P, Iterator[_T]]) -> Callable[_P, Iterator[_T]]:
    """Decorate a generator function. If a script keeps its generator, half-way, until the process
    exits, the rest never runs: by then transports are closed and modules are empty."""

    @functools.wraps(function)
    def begin(*args: _P.args, **kwargs: _P.kwargs) -> Iterator[_T]:
        generator = function(*args, **kwargs)
        _begun.add(generator)
        return generator

    return begin


@atexit.register  # early, so that it runs after most other exit handlers
def _at_exit() -> None:
    for generator in list(_begun):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(generator))  # Python would run its rest
    if _end.status_failed:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
