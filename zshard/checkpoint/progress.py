"""Progress bars for long operations.

A bar is for a person who watches. It appears on rank 0 only, on a terminal, if tqdm
is installed, and after some seconds. Otherwise nothing is printed.
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
    """Context that yields a function; call it with the number of bytes done, of `total`.

    delay: seconds before a bar appears.
    """
    if rank != 0 or not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        yield lambda count: None
        return
    from tqdm import tqdm  # type: ignore[import-untyped]

    with tqdm(
        total=total, desc=what, unit="B", unit_scale=True, delay=delay, file=sys.stderr
    ) as bar:
        yield bar.update
