"""Errors that Python code raises, and the line of the script that a warning points at.

This module imports nothing of zshard, so that any other module can raise and catch these errors.
"""

from __future__ import annotations

import os
import sys

__all__ = ["CheckpointError", "ShardError", "stacklevel"]


class CheckpointError(ValueError):
    """A checkpoint is damaged, unfinished or invalid; the message names the file and, where
    possible, the tensor."""


class ShardError(RuntimeError):
    """An operation needs the full tensor but got this rank's shard of it. The message names the
    parameter and what to write."""


def stacklevel() -> int:
    """Return the stacklevel that makes a warning of the caller point at the user's line."""
    level, frame = 1, sys._getframe(1)
    package = os.path.dirname(__file__) + os.sep
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        level, frame = level + 1, frame.f_back
    return level
