"""The log: Python's logger "zshard", whose messages begin with the rank.

Code logs a fact in one line, where the fact is known; longer reports are in extras/log.py. The C
core records in a ring, which drain() passes on when Python runs anyway (csrc/base/log.h).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from zshard import _core


class _Log(logging.LoggerAdapter[logging.Logger]):
    """Adds the rank. A handler that raises ends no step. Calls of zshard within a handler are
    not logged: they would call the handler again."""

    _rank = 0
    _complaint = ""
    _within = threading.local()

    def process(self, msg: Any, kwargs: Any) -> tuple[str, Any]:
        if dist.is_available() and dist.is_initialized():
            self._rank = dist.get_rank()  # kept for messages after the end of the group
        elif not self._rank:
            rank = os.environ.get("RANK", "")
            self._rank = int(rank) if rank.isdecimal() else 0
        return f"rank {self._rank}: {msg}", kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if self.isEnabledFor(level):
            kwargs.setdefault("stacklevel", 3)
            self._pass_on(super().log, level, msg, *args, **kwargs)

    def common(self, rank: int, msg: str, *args: object) -> None:
        """Log a fact that all ranks of a group share: at level info on rank 0, else at debug."""
        self.log(logging.DEBUG if rank else logging.INFO, msg, *args, stacklevel=4)

    def record(self, level: int, thread: int, at: int, text: str) -> None:
        """Log a record of the core."""
        if self.isEnabledFor(level):
            self._pass_on(self._handle, level, thread, at, text)

    def _handle(self, level: int, thread: int, at: int, text: str) -> None:
        text, _ = self.process(text, {})
        made = self.logger.makeRecord(self.logger.name, level, "zshard/_core", 0, text, (), None)
        made.created, made.msecs, made.thread = at / 1e9, at // 1_000_000 % 1000, thread
        self.logger.handle(made)

    def _pass_on(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if getattr(self._within, "is_busy", False):
            return
        self._within.is_busy = True
        try:
            call(*args, **kwargs)
        except Exception as error:
            text, before = f"zshard: a handler of the log raised {error!r}", self._complaint
            self._complaint = text
            if text != before:
                with contextlib.suppress(Exception):  # stderr may be closed
                    print(text, file=sys.stderr)
        finally:
            self._within.is_busy = False


log = _Log(logging.getLogger("zshard"), {})


def drain() -> None:
    """Log the core's records. The core calls it when it raises."""
    for level, thread, at, text in _core.log_records():
        log.record(level, thread, at, text)


@contextlib.contextmanager
def timed(rank: int, what: str, path: str) -> Iterator[list[int]]:
    """Context manager that logs how long an operation on all ranks took, or on which rank it has
    failed. Yields a list to which its body adds bytes."""
    begun, sizes = time.monotonic(), list[int]()
    try:
        yield sizes
    except BaseException as error:
        seconds, kind = time.monotonic() - begun, type(error).__name__
        log.info("%s of '%s' failed after %.2f s: %s: %s", what, path, seconds, kind, error)
        raise
    seconds = time.monotonic() - begun
    log.common(
        rank, "%s of '%s': %s bytes by this rank in %.2f s", what, path, f"{sum(sizes):,}", seconds
    )
