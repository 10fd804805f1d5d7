"""A cache of memory for short-lived tensors of the same sizes.

Full parameters come and go, unit after unit, with the same sizes. Memory that one
has freed goes to the next as it is: the kernel need not zero its pages again, and malloc, which
would fragment it, never sees it. What no tensor reuses is unmapped.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref

import torch
from torch import Tensor

_LEAST = 2**18  # bytes; smaller tensors are malloc's


class MemoryCache:
    """A cache of memory for tensors; memory returns once nothing refers to the tensor's storage."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialized CPU tensor of that shape and dtype, contiguous if large."""
        numel = math.prod(tensor.shape)
        size = numel * tensor.element_size()
        if size < _LEAST:
            return torch.empty_like(tensor, device="cpu", requires_grad=False)
        area = self._take(size)
        # The storage holds `bytes_`; its end is the storage's.
        bytes_ = (ctypes.c_char * size).from_buffer(area)
        weakref.finalize(bytes_, _give, weakref.ref(self), area).atexit = False
        flat = torch.frombuffer(bytes_, dtype=tensor.dtype, count=numel)
        return flat.view(tensor.shape)

    def _take(self, size: int) -> mmap.mmap:
        same = self._free.get(size)
        if same:
            return same.pop()
        self._free.clear()  # another shape follows: what is left of the last would only be held
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def give(self, area: mmap.mmap) -> None:
        """Return memory to the cache."""
        self._free.setdefault(len(area), []).append(area)


def _give(owner: weakref.ref[MemoryCache], area: mmap.mmap) -> None:
    areas = owner()
    if areas is not None:
        areas.give(area)
