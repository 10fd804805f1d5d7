"""Views of guarded shards: `p[row]`, `p[2:4]`, `p.chunk(4)`, and assignments to them.

A shard is a run of the parameter's elements in memory order, and so are its rows. This rank's share
of such a view is also a shard, with its own Part, and may be empty. A view that is not a run, such
as a column, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zshard import _core
from zshard._errors import ShardError
from zshard.guard.rules import VIEWS
from zshard.guard.slices import Operation, plain, refuse, run_plain, slices_among
from zshard.guard.words import refused_index
from zshard.units.shards import Part, asked_for_size

__all__ = ["HANDLERS"]


def _view(func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return one view, or a tuple of them."""
    target = args[0]
    part = _core.slice_part(target)
    if part is None:
        return run_plain(func, args, kwargs)
    found = _views_of(part, func, (*args[1:], *kwargs.values()), args, kwargs)
    if found is None or _is_recorded(target):
        return refuse(func, args, kwargs)
    made = [_share_of(target, part, *each) for each in found]
    return made[0] if func in _SINGLE else tuple(made)


_SINGLE = {getattr(Tensor, name) for name in ("__getitem__", "narrow", "select")}


def _views_of(
    part: Part,
    func: Operation,
    others: tuple[Any, ...],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> list[tuple[tuple[int, ...], int]] | None:
    """Return the shapes of the views of the full tensor and their offsets in it; None if one of
    them is not a run of elements. Raises torch's error for an index that is out of range."""
    if slices_among(others):
        return None
    with plain():
        full = torch.empty(part.shape, device="meta")
        given = func(full, *args[1:], **kwargs)
        views = [given] if isinstance(given, Tensor) else list(given)
        memory = full.untyped_storage()._cdata
        if not all(v.untyped_storage()._cdata == memory and v.is_contiguous() for v in views):
            return None
        return [(tuple(view.shape), int(view.storage_offset())) for view in views]


def _is_recorded(target: Tensor) -> bool:
    """Return whether autograd records operations on it. Then it is used in a loss, which needs all
    elements."""
    return torch.is_grad_enabled() and target.requires_grad


def _share_of(target: Tensor, part: Part, shape: tuple[int, ...], offset: int) -> Tensor:
    """Return this rank's share of a view."""
    own = part.of_view(shape, offset)
    with plain():
        first = own.begin + offset - part.begin if own.numel else 0
        run = target.view(-1)[first : first + own.numel].view(own.local_shape)
    marked: Tensor = _core.mark_slice(run, own)
    return marked


def _set(func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """`t[mask] = number` with a mask like the shard (torch.optim.Rprop), and `t[2:4] = number`."""
    target, key, value = args
    part = _core.slice_part(target)
    if part is None or (isinstance(value, Tensor) and value.numel() != 1):
        return refuse(func, args, kwargs)
    mask = _core.slice_part(key) if isinstance(key, Tensor) else None
    if mask is not None:
        if mask.geometry is not part.geometry or key.dtype != torch.bool:
            return refuse(func, args, kwargs)
        return _write(part, target, func, args)
    found = _views_of(part, Tensor.__getitem__, (key, value), (target, key), {})
    if found is None or _is_recorded(target):
        return refuse(func, args, kwargs)
    if found[0][0] == () != part.shape and part.root in asked_for_size:
        raise ShardError(refused_index(part))
    share = _share_of(target, part, *found[0])
    return _write(_core.slice_part(share), share, Tensor.fill_, (share, value))


def _write(part: Part, target: Tensor, func: Operation, args: tuple[Any, ...]) -> None:
    with part.writing(target, func):
        run_plain(func, args, {})


HANDLERS: dict[Any, Operation] = {
    **{getattr(Tensor, name): _view for name in VIEWS},
    Tensor.__setitem__: _set,
}
