"""The memory layout of an optimizer's state.

The state tensors of one name are adjacent in one block, spaced like the parameters.
Where parameters are adjacent in a shard, so is their state, and the C loop updates all of them as
one run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zshard import _core
from zshard.guard.slices import guard_like

__all__ = ["ALIGN", "zeros_side_by_side"]

ALIGN = 64
"""Bytes: a cache line, and the largest gap that padding leaves between parameters in a shard."""


def zeros_side_by_side(params: Sequence[Tensor]) -> list[Tensor]:
    """Return a tensor of zeros for each of `params`, of its shape, dtype, device and memory format.

    Those for contiguous tensors are views of one block per dtype and device, in the parameters'
    order, and with their gaps where they are within a cache line of each other.
    """
    made: dict[int, Tensor] = {}
    blocks: dict[tuple[torch.dtype, torch.device, bool], list[int]] = {}  # ..., is it offloaded
    for i, param in enumerate(params):
        if param.device.type in ("cpu", "cuda") and param.is_contiguous():
            kind = param.dtype, param.device, _core.offloads_state(param)
            blocks.setdefault(kind, []).append(i)
        else:
            made[i] = torch.zeros_like(param, memory_format=torch.preserve_format)
    for (dtype, device, offloaded), members in blocks.items():
        starts, length = _places([params[i] for i in members])
        if offloaded:
            block = _core.offloaded_zeros(params[members[0]], length)
        else:
            block = torch.zeros(length, dtype=dtype, device=device)
        for i, start in zip(members, starts, strict=True):
            made[i] = block[start : start + params[i].numel()].view(params[i].shape)
    return [guard_like(made[i], params[i]) for i in range(len(params))]


def _places(params: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each tensor starts in a block that is spaced as they are; the block's length.

    In elements. Tensors that are not neighbours in memory start at a multiple of ALIGN bytes.
    """
    starts: list[int] = []
    at, end = 0, None
    for param in params:
        item = param.element_size()
        gap = ALIGN if end is None else param.data_ptr() - end
        if 0 <= gap < ALIGN and gap % item == 0:
            at += gap // item
        else:
            at = -(-at * item // ALIGN) * ALIGN // item
        starts.append(at)
        at += param.numel()
        end = param.data_ptr() + param.numel() * item
    return starts, at
