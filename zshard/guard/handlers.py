"""Python handlers for operations on shards that are neither elementwise nor queries of facts: views
(`p[row]`, `p[2:4]`, `p.chunk(4)`), assignments to them, and others.

A handler gets an operation with its arguments. The list in guard/rules.py chooses the operations
that get here; an operation without a handler is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zshard import _core
from zshard._errors import ShardError
from zshard.guard import draws
from zshard.guard.rules import LIKE_AT_RANDOM, NEW, SIZES, VIEWS
from zshard.guard.slices import (
    RULES,
    Operation,
    ShardParameter,
    ShardTensor,
    WholeParameter,
    guard_like,
    has_memory_of,
    plain,
    refuse,
    run_plain,
    slices_among,
)
from zshard.guard.words import after_size, refused_grad_dtype
from zshard.units.shards import Part, _parts, part_of

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


def _full_draw(func: Operation, args: Args, kwargs: Kwargs) -> Any:
    """Return this rank's shard of a draw for the full tensor: the values that DDP would have."""
    others = dict(kwargs)
    tensor = args[0] if args else others.pop("input")
    part = _core.slice_part(tensor)
    if part is None:
        return run_plain(func, args, kwargs)
    with plain():
        like = tensor.new_empty(()).expand(part.shape)
        drawn = part.of(func(like, *args[1:], **others)).clone()
    return _core.mark_slice(drawn, part)


def _get_data(func: Operation, args: Args, kwargs: Kwargs) -> Any:
    """`p.data`, also of a parameter that is unsharded right now, as in hooks of a backward."""
    param = args[0]
    if _core.slice_part(param) is None and (part := part_of(param)) is not None:
        part.watch_data()
    return guard_like(run_plain(func, args, kwargs), param)


def _as_first(func: Operation, args: Args, kwargs: Kwargs) -> Any:
    """`p.new_zeros(p.shape)` and `p.type(dtype)` are sharded like p, but not a tensor of another
    shape. `p.type()` is a name."""
    result = run_plain(func, args, kwargs)
    return result if isinstance(result, str) else guard_like(result, args[0])


def _set(func: Operation, args: Args, kwargs: Kwargs) -> Any:
    """`p.set_(p)`, which changes nothing; any other call is refused."""
    if len(args) > 1 and has_memory_of(args[0], args[1]):
        return args[0]
    return refuse(func, args, kwargs)


def _set_grad_dtype(func: Operation, args: Args, kwargs: Kwargs) -> Any:
    param, dtype = args
    part = _core.slice_part(param)
    if part is not None and dtype != param.dtype:
        raise NotImplementedError(refused_grad_dtype(part.name, dtype))
    return run_plain(func, args, kwargs)


def _gradients(func: Operation, args: Args, kwargs: Kwargs) -> Any:
    """Gradients with respect to parameters, which are unsharded in backward; not of a shard."""
    outputs = args[0] if args else kwargs.get("outputs", kwargs.get("tensors"))
    if slices_among([outputs]):
        return refuse(func, args, kwargs)
    return run_plain(func, args, kwargs)


def _update(func: Operation, args: Args, kwargs: Kwargs) -> Any:
    """A library's elementwise update of a parameter, correct on shards of the same elements."""
    slices = [each for each in (*args, *kwargs.values()) if slices_among([each])]
    parts = slices_among(slices)
    if len({id(part.geometry) for part in parts}) > 1:
        return refuse(func, args, kwargs)
    with contextlib.ExitStack() as writes:
        for part, tensor in zip(parts, slices, strict=True):
            writes.enter_context(part.writing(tensor, func))
        return run_plain(func, args, kwargs)


def _size(func: Operation, args: Args, kwargs: Kwargs) -> Any:
    """Return the size of this rank's shard; within a forward of the model, that of the full
    parameter.

    Notes that the script has read the size. Numbers that a script computes from a shard's size
    would be wrong, so draws.py refuses random numbers of such a range. Scripts do not compute a
    range from numel(), so that is not noted."""
    part = _core.slice_part(args[0])
    if part is None:
        return run_plain(func, args, kwargs)
    if part.is_in_forward():
        with plain():
            return func(torch.empty(part.shape, device="meta"), *args[1:], **kwargs)
    if func not in (Tensor.numel, Tensor.nelement) and part.state is not None:
        part.state.sizes_read.add(part.index)
    return run_plain(func, args, kwargs)


# --- views ----------------------------------------------------------------------------------------
#
# A shard is a run of the parameter's elements in memory order, and so are its rows. This rank's
# share of such a view is also a shard, with its own Part, and may be empty. A view that is not a
# run, such as a column, is refused.


def _view(func: Operation, args: Args, kwargs: Kwargs) -> Any:
    """Return one view, or a tuple of them."""
    target = args[0]
    part = _core.slice_part(target)
    if part is None:
        return run_plain(func, args, kwargs)
    views = _views_of(part, func, args, kwargs)
    if views is None or _is_recorded(target):
        return refuse(func, args, kwargs)
    shares = [_share_of(target, part, *each) for each in views]
    return tuple(shares) if func in (Tensor.chunk, Tensor.split) else shares[0]


def _views_of(
    part: Part, func: Operation, args: Args, kwargs: Kwargs
) -> list[tuple[tuple[int, ...], int]] | None:
    """Return the shapes of the views of the full tensor and their offsets in it; None if one of
    them is not a run of elements. Raises torch's error for an index that is out of range."""
    if slices_among((*args[1:], *kwargs.values())):
        return None
    with plain():
        full = torch.empty(part.shape, device="meta")
        result = func(full, *args[1:], **kwargs)
        views = [result] if isinstance(result, Tensor) else list(result)
        memory = full.untyped_storage()._cdata
        if not all(v.untyped_storage()._cdata == memory and v.is_contiguous() for v in views):
            return None
        return [(tuple(view.shape), int(view.storage_offset())) for view in views]


def _is_recorded(target: Tensor) -> bool:
    """Return whether autograd records it, for a loss, which needs all elements."""
    return torch.is_grad_enabled() and target.requires_grad


def _share_of(target: Tensor, part: Part, shape: tuple[int, ...], offset: int) -> Tensor:
    share = part.of_view(shape, offset)
    with plain():
        first = share.begin + offset - part.begin if share.numel else 0
        run = target.view(-1)[first : first + share.numel].view(share.local_shape)
    marked: Tensor = _core.mark_slice(run, share)
    return marked


def _set_item(func: Operation, args: Args, kwargs: Kwargs) -> Any:
    """`t[mask] = number` with a mask like the shard (torch.optim.Rprop), and `t[2:4] = number`."""
    target, key, value = args
    part = _core.slice_part(target)
    is_number = not isinstance(value, Tensor) or value.numel() == 1
    if part is None or not is_number:
        return refuse(func, args, kwargs)
    mask = _core.slice_part(key) if isinstance(key, Tensor) else None
    if mask is not None:
        if mask.geometry is not part.geometry or key.dtype != torch.bool:
            return refuse(func, args, kwargs)
        return _write_to(part, target, func, args)
    views = _views_of(part, Tensor.__getitem__, (target, key), {})
    if views is None or slices_among([value]) or _is_recorded(target):
        return refuse(func, args, kwargs)
    if views[0][0] == () != part.shape and part.is_size_read:
        raise ShardError(after_size("an index set one element of", part))
    share = _share_of(target, part, *views[0])
    return _write_to(_core.slice_part(share), share, Tensor.fill_, (share, value))


def _write_to(part: Part, target: Tensor, func: Operation, args: Args) -> None:
    with part.writing(target, func):
        run_plain(func, args, {})


_HANDLERS: dict[Any, Callable[[Operation, Args, Kwargs], Any]] = {
    **dict.fromkeys(LIKE_AT_RANDOM, _full_draw),
    Tensor.type: _as_first,
    Tensor.data.__get__: _get_data,  # type: ignore[attr-defined]
    **{getattr(Tensor, name): _as_first for name in NEW},
    **{getattr(Tensor, name): _size for name in SIZES},
    Tensor.shape.__get__: _size,  # type: ignore[attr-defined]
    **dict.fromkeys((torch.autograd.grad, torch.autograd.backward), _gradients),
    Tensor.set_: _set,
    getattr(getattr(Tensor, "grad_dtype", None), "__set__", None): _set_grad_dtype,
    "bitsandbytes::optimizer_update_32bit": _update,  # 8-bit updates have a scale per block
    **{getattr(Tensor, name): _view for name in VIEWS},
    Tensor.__setitem__: _set_item,
    **draws.HANDLERS,
}
"""By operation; of a library, by its name."""


def _handle(func: Operation, types: object, args: Args, kwargs: Kwargs) -> Any:
    """Handle what py_guard.c does not: what is not on the list, and shards that do not match."""
    handler = _HANDLERS.get(func) or _HANDLERS.get(getattr(func, "_qualified_op_name", None))
    return (handler or refuse)(func, args, kwargs)


def set_guard() -> None:
    """Give the core its guard functions."""
    types = (Tensor, nn.Parameter, ShardTensor, ShardParameter, WholeParameter)
    _core.set_guard(types, RULES, _parts, _handle)
