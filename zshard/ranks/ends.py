"""How this rank ends: in order, or by an exception, whose words its peers are to hear.

What has to be done then is registered here by those who know how, so that this file
stands below them. A forked child is no rank, and reports nothing.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from types import TracebackType

_reported_pid = 0  # whose end is reported; 0: nobody's yet
_failed = False  # an exception ends this program,
_exit_text = ""  # and this is what it says
_exit_callbacks: list[Callable[[float], None]] = []


def watch(on_failure: Callable[[str], None], on_exit: Callable[[], None]) -> None:
    """Call `on_failure` with the text of an exception that ends this program, and `on_exit` when
    it exits. Only the first call counts."""
    global _reported_pid
    if _reported_pid != 0:
        return
    _reported_pid = os.getpid()
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        global _failed, _exit_text
        if is_reported():
            _failed, _exit_text = True, f"{kind.__name__}: {value}"
            on_failure(_exit_text)
        previous(kind, value, trace)

    sys.excepthook = hook
    atexit.register(on_exit)


def is_reported() -> bool:
    """Return whether this process is the rank, and not a forked child of it."""
    return os.getpid() == _reported_pid


def has_failed() -> bool:
    """Return whether an exception ends this program, or a peer was lost."""
    return _failed


def note_failure() -> None:
    """From now on, has_failed()."""
    global _failed
    _failed = True


def last_words() -> str:
    """Return the text of the exception that ends this program; empty if there is none."""
    return _exit_text


def add_exit_callback(call: Callable[[float], None]) -> None:
    """Have a rank that ends in order call this, with the seconds that it may take."""
    if call not in _exit_callbacks:
        _exit_callbacks.append(call)


def say_farewell(timeout: float) -> None:
    """Call what add_exit_callback() was given."""
    for call in _exit_callbacks:
        call(timeout)
