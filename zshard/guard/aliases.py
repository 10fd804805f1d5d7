"""Tensors on memory that a parameter has left keep their values, as in plain PyTorch.

A script that swaps weights, such as `backup = p.data; p.data = average`, has `backup` where the
shard lies. The new values are about to be written there: peers map this memory, so it is the
parameter's for good.

The other tensors move, to a copy. Nothing has kept a list of them, which would cost
time in each `.data`: all objects that Python's garbage collector knows are looked through, only
where the shard's storage has more users than parameters.
"""

from __future__ import annotations

import bisect
import gc
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zshard import _core
from zshard.guard.slices import plain

__all__ = ["move_from"]


class _Area(NamedTuple):
    """Memory that a parameter has left."""

    begin: int  # address
    size: int  # bytes; 0 if this rank has no elements
    unit: _core.Unit | None
    place: int  # of the parameter in the unit


def move_from(left: Sequence[tuple[Any, ...]]) -> None:
    """Move all tensors that lie within one of the areas to copies of these. Views of one area share
    its copy."""
    areas = sorted((_Area(*each) for each in left), key=operator.itemgetter(0, 1))
    copies: dict[int, Tensor] = {}
    with plain(), torch.no_grad(), torch.inference_mode(False):
        for tensor, area in list(_tensors_in(areas)):
            if area.size == 0:
                tensor.data = torch.empty_like(tensor)
                continue
            if area.begin not in copies:
                copies[area.begin] = _copy_of(tensor, area)
            offset = (tensor.data_ptr() - area.begin) // tensor.element_size()
            source = copies[area.begin].view(tensor.dtype)
            tensor.data = source.as_strided(tensor.size(), tensor.stride(), offset)


def _tensors_in(areas: Sequence[_Area]) -> Iterator[tuple[Tensor, _Area]]:
    for each in gc.get_objects():
        if issubclass(type(each), Tensor) and (area := _area_of(each, areas)) is not None:
            yield each, area


def _area_of(tensor: Tensor, areas: Sequence[_Area]) -> _Area | None:
    try:
        begin = tensor.data_ptr()
    except Exception:  # it has no memory, or is some class of its own
        return None
    if tensor.numel() == 0:
        return _area_of_none(tensor, areas)
    last = bisect.bisect_right(areas, begin, key=operator.itemgetter(0)) - 1
    if last < 0 or tensor.layout != torch.strided:
        return None
    steps = ((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True))
    end = begin + (1 + sum(steps)) * tensor.element_size()
    area = areas[last]  # of several that begin here, that with elements
    return area if end <= area.begin + area.size else None


def _area_of_none(tensor: Tensor, areas: Sequence[_Area]) -> _Area | None:
    """The area of which a slice without elements is, on a rank that has none of the parameter's:
    later writes to it then are no writes to the parameter, as on the other ranks."""
    part = _core.slice_part(tensor)
    if part is None:
        return None
    return next((a for a in areas if a.size == 0 and a[2:] == (part.unit, part.index)), None)


def _copy_of(tensor: Tensor, area: _Area) -> Tensor:
    """A copy of the memory that the area is, of which `tensor` uses a part, as bytes."""
    storage = tensor.untyped_storage()
    begin = area.begin - storage.data_ptr()
    bytes_of_storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return bytes_of_storage[begin : begin + area.size].clone()
