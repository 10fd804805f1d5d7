"""Errors that no call is left to raise: they are printed, and the process exits with status 1.

Python prints what an exit handler raises and exits with status 0 all the same, so a
launcher would take the run for a good one.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys

__all__ = ["fail"]

_failed = False


def fail(text: str) -> None:
    """Print an error. When all exit handlers have run, the process exits with status 1."""
    global _failed
    _failed = True
    print(text, file=sys.stderr, flush=True)


def _at_exit() -> None:
    if _failed:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


atexit.register(_at_exit)  # registered early, so that it runs after most other exit handlers
