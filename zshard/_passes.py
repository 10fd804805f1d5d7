"""End a forward that an exception has left.

The one idea: torch runs a module's forward hooks after an Exception, but not after a
KeyboardInterrupt or SystemExit. So whoever calls a unit's forward notes how many forwards are open
before, and on any exception ends those that have been opened since: a script that catches it can go
on, and the other ranks are not kept waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zshard import _core

__all__ = ["call_guarded"]

_LONGEST = 200  # characters of an exception that the other ranks get


def call_guarded(unit: _core.Unit, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return call(*args, **kwargs), and end what is open of the unit's model if that raises."""
    n_open = unit.n_open
    try:
        return call(*args, **kwargs)
    except BaseException as error:
        unit.unwind(n_open, _what(error) if n_open == 0 else "")
        raise


def _what(error: BaseException) -> str:
    """What the other ranks' errors say of this one; "" if it comes from another rank."""
    if isinstance(error, (_core.PeerError, _core.PeerTimeoutError, _core.DivergenceError)):
        return ""
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"raised {type(error).__name__}{': ' if text else ''}{text} in forward"[:_LONGEST]
