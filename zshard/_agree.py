"""Do the ranks hold the same model? Asked at wrap time, before anything is shared.

The one idea: ranks exchange one short hash; only if it differs do they exchange the whole
description, find the first difference and all raise the same error.
"""

from __future__ import annotations

import ctypes
import hashlib
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from zshard import _core

Fact = tuple[str, str]  # (what it is about, what it says)


def check_agreement(comm: _core.Comm, group: Any | None, facts: Sequence[Fact]) -> None:
    """Raises DivergenceError on every rank, naming the first fact that differs."""
    if group is None:
        return
    digest = hashlib.sha256(repr(list(facts)).encode()).digest()
    if len(set(comm.exchange(digest))) == 1:
        return
    everyone: list[Any] = [None] * comm.world
    dist.all_gather_object(everyone, list(facts), group=group)
    for rank in range(1, comm.world):
        message = _first_difference(everyone[0], everyone[rank], rank)
        if message is not None:
            raise _core.DivergenceError(message)


def _first_difference(ours: list[Fact], theirs: list[Fact], rank: int) -> str | None:
    for mine, other in zip(ours, theirs, strict=False):
        if mine == other:
            continue
        if mine[0] != other[0]:
            return (
                f"the models differ between ranks: where rank 0 has {mine[0]} ({mine[1]}), "
                f"rank {rank} has {other[0]} ({other[1]})"
            )
        return (
            f"the models differ between ranks: {mine[0]} is {mine[1]} on rank 0 "
            f"and {other[1]} on rank {rank}"
        )
    if len(ours) != len(theirs):
        longer, rank_of = (ours, 0) if len(ours) > len(theirs) else (theirs, rank)
        extra = longer[min(len(ours), len(theirs))]
        return f"the models differ between ranks: only rank {rank_of} has {extra[0]} ({extra[1]})"
    return None


def tensor_fact(kind: str, name: str, tensor: torch.Tensor) -> Fact:
    """What has to agree of a parameter or buffer."""
    grad = ", trainable" if tensor.requires_grad else ""
    return f"{kind} '{name}'", f"shape {tuple(tensor.shape)}, {tensor.dtype}{grad}"


def value_fact(name: str, tensor: torch.Tensor) -> Fact:
    """A checksum of the values."""
    plain = tensor.detach().contiguous()
    size = plain.numel() * plain.element_size()
    data = (ctypes.c_char * size).from_address(plain.data_ptr()) if size else b""
    return f"the value of '{name}'", f"of checksum {zlib.crc32(data):08x}"
