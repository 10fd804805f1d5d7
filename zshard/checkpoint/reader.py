"""Read values into place.

A shard of a tensor is one run of bytes in the checkpoint, and one in memory. If dtype
and device match, the run is read directly into place; otherwise it is read a chunk at a time and
cast, or copied to the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zshard.checkpoint.checkpoint import Readable
from zshard.ranks.agreement import bytes_of
from zshard.state.source import ChunkMemory, chunks, flat_of


class Reader:
    """The source of what is in files. Calls `done` with the number of bytes of each read."""

    def __init__(self, done: Callable[[int], object] | None = None) -> None:
        self._done = done
        self._memory = ChunkMemory()

    def whole(self, entry: Readable) -> Tensor:
        """Read a full tensor into new memory on the CPU."""
        made = torch.empty(entry.shape, dtype=entry.dtype)
        self.read(entry, 0, made)
        return made

    def read(self, entry: Readable, begin: int, target: Tensor) -> None:
        """Fill `target` with row-major elements of `entry` from `begin` on, cast to its dtype.
        Raise OSError or CheckpointError, naming the file."""
        if target.numel() == 0:
            return
        item = entry.dtype.itemsize
        with flat_of(target) as flat:
            if flat.dtype == entry.dtype and flat.device.type == "cpu":
                entry.read_into(bytes_of(flat), begin * item)
                torch.autograd.graph.increment_version(target)
            else:
                for first, last in chunks(flat.numel(), entry.dtype):
                    chunk = self._memory.of(last - first, entry.dtype)
                    entry.read_into(bytes_of(chunk), (begin + first) * item)
                    flat[first:last].copy_(chunk)
        if self._done is not None:
            self._done(target.numel() * item)
