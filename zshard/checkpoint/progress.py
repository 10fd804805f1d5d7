"""A progress bar for saves, loads and exports of more than two seconds, on rank 0 of a terminal.

It is tqdm's, if that is installed; `TQDM_DISABLE=1` turns it off. Code that reads or writes
calls advance(), which does nothing without a bar.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

_OPTIONS: dict[str, Any] = {"delay": 2.0, "unit": "B", "unit_scale": True, "miniters": 1}
_OPTIONS |= {"dynamic_ncols": True, "leave": False}  # delay: seconds before it shows

_shown: ContextVar[Any] = ContextVar("_shown", default=None)
"""The bar of this thread."""


@contextlib.contextmanager
def bar(words: str, total: Callable[[], int], show: bool) -> Iterator[None]:
    """Context manager in which advance() moves a bar of `total()` bytes, if `show`. Only the
    main thread has one: a save in the background shows nothing."""
    made = _new(words, total) if show else None
    before = _shown.set(made)
    try:
        yield
    finally:
        _shown.reset(before)
        if made is not None:
            with contextlib.suppress(Exception):
                made.close()


def advance(count: int) -> None:
    """So many more bytes are done."""
    made = _shown.get()
    if made is not None:
        with contextlib.suppress(Exception):  # a terminal that was closed, a script's own stderr
            made.update(count)


def _new(words: str, total: Callable[[], int]) -> Any:
    """Return a bar that is not drawn yet; None without a terminal or tqdm."""
    if threading.current_thread() is not threading.main_thread():
        return None
    try:
        if not sys.stderr.isatty():
            return None
        tqdm = importlib.import_module("tqdm").tqdm
    except (AttributeError, ValueError, ImportError):  # no stderr, a closed one, no tqdm
        return None
    # Without tqdm's thread; with a lock of its own, as tqdm keeps it for ever if a draw raises.
    made = type("Bar", (tqdm,), {"monitor_interval": 0, "_lock": threading.RLock()})
    with contextlib.suppress(Exception):  # KeyError: a tqdm without `delay`
        return made(desc=f"zshard: {words}", total=total(), **_OPTIONS)
    return None
