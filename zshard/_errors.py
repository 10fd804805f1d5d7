"""The errors of zshard that are not of its core.

The one idea: they stand below all else, so that any part can raise and recognize them.
"""

from __future__ import annotations

__all__ = ["CheckpointError", "ShardError"]


class CheckpointError(ValueError):
    """A checkpoint is damaged, unfinished or invalid; the message names the file and, where
    possible, the tensor."""


class ShardError(RuntimeError):
    """An operation needs the whole tensor, but was given this rank's shard of it. The message names
    the parameter and what to write."""
