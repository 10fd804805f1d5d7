"""A bar on the terminal for what takes long.

The one idea: it is for somebody who looks on: on rank 0, on a terminal, with tqdm installed, and
only when it has taken some seconds already. Else nothing is printed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator

_DELAY = 3.0  # seconds


@contextlib.contextmanager
def progress(
    total: int, what: str, rank: int = 0, delay: float = _DELAY
) -> Iterator[Callable[[int], object]]:
    """Context with a function that is told how many of the `total` bytes have been done.

    delay: seconds that it may take before a bar is drawn.
    """
    if rank != 0 or not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        yield lambda count: None
        return
    from tqdm import tqdm  # type: ignore[import-untyped]

    with tqdm(
        total=total, desc=what, unit="B", unit_scale=True, delay=delay, file=sys.stderr
    ) as bar:
        yield bar.update
