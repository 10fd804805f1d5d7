"""What is loaded into parameters is told to their model.

Ranks that load alone, or something else than the others, are an error, which the
model finds (csrc/engine/history.h). It is told a number for each loaded parameter, which ranks that
load the same have in common.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from zshard import _core

_SAMPLES = 16  # elements of a loaded tensor that tell it from another

NotedLoad = tuple[_core.Unit, int, int]  # a parameter that is loaded: its index; content_of() it

planned_loads: ContextVar[list[NotedLoad] | None] = ContextVar("planned_loads", default=None)
"""Set while a load is only planned: collects what it would load."""


def note_loads(loads: Iterable[NotedLoad]) -> None:
    """Tell the models what has been loaded, as ranks that load alone are an error."""
    planned = planned_loads.get()
    if planned is not None:
        planned += loads
        return
    for unit, index, content in loads:
        unit.note_load(index, content)


def content_of(value: Any, is_slice: bool) -> int:
    """Return a number that ranks which load the same have in common, from a few of its elements."""
    plain = type(value) in (torch.Tensor, nn.Parameter) and not is_slice
    if not plain or value.numel() == 0 or value.is_meta:
        return 0
    flat = value.detach().reshape(-1)
    some = flat[:: -(-flat.numel() // _SAMPLES)].tolist()
    return zlib.crc32(repr((some, tuple(value.shape))).encode())
