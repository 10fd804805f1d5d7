"""The global gradient norm, for model.clip_grad_norm_ and for torch.nn.utils.clip_grad_norm_.

A rank holds shards of the gradients, so a norm over them alone is meaningless. `_core.grad_owner`
recognizes gradients on a shard by their storage; ranks exchange the power sums and add them, so
every rank scales by the same bits. On the CPU the squares are known from the sums over the ranks,
and the step multiplies (docs/design/clipping.md). All torch.nn.utils functions that need a total
norm call `clip_grad._get_total_norm`, which this file replaces; for a list without sharded
gradients it is torch's own.

The other gradients in a list (of ignored modules, or with strategy "no_shard") are the same on all
ranks and counted once.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import utils as nn_utils
from torch.nn.utils import clip_grad

from zshard import _core
from zshard._errors import ShardError
from zshard.guard.slices import grads_of, plain
from zshard.guard.whole_values import added, power_sum_of
from zshard.optim.in_backward import refuse_clipping
from zshard.ranks.agreement import PublicCall
from zshard.ranks.transports import ranks_of
from zshard.units.extensions import EXTENSIONS, Extension
from zshard.units.shards import known_parts, part_of

# torch's functions within the wrappers that turn gradients off.
_torchs_total_norm: Callable[..., Tensor] = inspect.unwrap(nn_utils.get_total_norm)
_torchs_scale: Callable[..., None] = inspect.unwrap(nn_utils.clip_grads_with_norm_)

_REPLACED = (
    "the .grad of sharded parameter '{}' was replaced by another tensor: modify it in place "
    "(p.grad.copy_(...)); for norms of other sharded tensors, use zshard.named_norms(model)"
)


def install() -> None:
    """Make torch.nn.utils compute the global norm. Idempotent."""
    _teach(clip_grad._get_total_norm, _torchs_total_norm, _get_total_norm)
    _teach(clip_grad._clip_grads_with_norm_, _torchs_scale, _clip_grads_with_norm_)


def _teach(wrapper: Any, torchs: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Make torch's wrapper call the replacement: scripts may have imported the wrapper."""
    for cell in wrapper.__closure__:
        if cell.cell_contents is torchs:
            cell.cell_contents = replacement


@plain()
def clip_grad_norm(
    params: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients of `params` in place so that their global norm is at most `max_norm`.

    Collective if any parameter is sharded.

    max_norm: upper bound of the norm.
    norm_type: order p of the norm, positive; inf for the maximum norm.
    error_if_nonfinite: raise RuntimeError if the norm is NaN or infinite.

    Returns the norm before clipping: a 0-dim tensor of the gradients' dtype (at least float32),
    bit-identical on all ranks. Raises RuntimeError if parameters are stepped in backward, or if
    the `.grad` of a sharded parameter was replaced by another tensor, whose share of the norm is
    unknown; ValueError if `norm_type` is not positive.
    """
    params = list(params)
    refuse_clipping(params)
    _refuse_other_ranks(params)
    _refuse_foreign(params)
    grads = [grad for grad in grads_of(params) if grad is not None]
    total = _get_total_norm(grads, norm_type, error_if_nonfinite)
    # Reading the norm would wait for a GPU. Not < 1: NaN reaches the gradients, as in torch.
    if total.is_cuda or _core.on_gpu(grads) or not max_norm / (total + 1e-6) >= 1:
        clip_grad._clip_grads_with_norm_(params, max_norm, total)
    _note_norm(params, total)
    return total


def _note_norm(params: Iterable[Tensor], total: Tensor) -> None:
    """Note a norm, before clipping, for the metrics of the parameters' model."""
    part = next(filter(None, map(part_of, params)), None)
    if part is not None and part.state is not None:
        part.state.model.norm = total


def _refuse_other_shards(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        part = _core.slice_part(tensor)
        if part is not None and isinstance(tensor, torch.nn.Parameter):
            raise ShardError(
                f"cannot take the norm of sharded parameter '{part.name}': pass gradients, [p.grad "
                "for p in model.parameters() if p.grad is not None], or use zshard.named_norms()"
            )
        if part is not None:
            raise RuntimeError(_REPLACED.format(part.name))


def _refuse_foreign(params: Sequence[Tensor]) -> None:
    for param, grad in zip(params, grads_of(params), strict=True):
        if grad is None or _core.grad_owner(grad) is not None:
            continue
        info = _core.shard_info(param) if _core.is_shard(param) else None
        if info is not None:
            raise RuntimeError(_REPLACED.format(info["name"]))


@plain()
def _refuse_other_ranks(tensors: Iterable[Tensor]) -> None:
    """Raise if units over different ranks hold these parameters or gradients: each rank would
    compute another norm, and scale what they share by another factor."""
    pairs = known_parts()
    if len({id(part.comm) for _, part in pairs}) < 2:
        return
    grads = zip(grads_of(param for param, _ in pairs), pairs, strict=True)
    by_memory = {_memory_of(grad): part for grad, (_, part) in grads if grad is not None}
    parts = (part_of(each) or by_memory.get(_memory_of(each)) for each in tensors)
    parts_by_comm = {id(part.comm): part for part in parts if part is not None}
    for first, other in itertools.pairwise(parts_by_comm.values()):
        if ranks_of(first.comm) != ranks_of(other.comm):
            raise NotImplementedError(
                f"'{first.name}' and '{other.name}' have no norm together, as their units are over "
                "different ranks: call torch.nn.utils.clip_grad_norm_() or get_total_norm() once "
                "for the parameters of each process group"
            )


def _memory_of(tensor: Tensor) -> int:
    """Return a number for the tensor's memory; for a sparse one, for the tensor."""
    strided = tensor.layout == torch.strided
    return tensor.untyped_storage()._cdata if strided else id(tensor)


@functools.wraps(_torchs_scale)
@plain()
def _clip_grads_with_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    _refuse_foreign(params)  # torch's clip_grad_norm_ calls this before it scales anything
    _refuse_other_ranks(params)
    _note_norm(params, total_norm)
    all_grads = grads_of(params)
    grads = [grad for grad in all_grads if grad is not None]
    factor = torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)
    if not _core.on_gpu(grads):
        left = [] if float(factor) == 1 else _core.scale_later(grads, float(factor))
        if left:
            ids = set(map(id, left))
            now = [param for param, grad in zip(params, all_grads, strict=True) if id(grad) in ids]
            _torchs_scale(now, max_norm, total_norm, foreach)
    elif any(grad.dtype == torch.float64 for grad in grads):
        _torchs_scale(params, max_norm, total_norm, foreach)
    else:  # adjacent shards at once, by a factor that stays on the GPU
        _core.scale_by(grads, factor.to(grads[0].device, torch.float32))


@functools.wraps(_torchs_total_norm)
@torch.no_grad()
def _get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    grads = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not grads:
        refuse_clipping()
    _refuse_other_ranks(grads)
    sharded: dict[_core.Engine, list[Tensor]] = {}
    unsharded: list[Tensor] = []
    for grad in grads:
        owner = _core.grad_owner(grad)
        (unsharded if owner is None else sharded.setdefault(owner, [])).append(grad)
    _refuse_other_shards(unsharded)
    if not sharded and _owner_of_norms() is None:  # torch's own waits only for error_if_nonfinite
        return _torchs_total_norm(grads, norm_type, error_if_nonfinite, foreach)
    with plain():
        return _norm_over_ranks(sharded, unsharded, norm_type, error_if_nonfinite)


def _norm_over_ranks(
    sharded: dict[_core.Engine, list[Tensor]],
    unsharded: Sequence[Tensor],
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    if not norm_type > 0:
        raise ValueError(f"norm_type must be a positive number or inf, got {norm_type}")
    grads = [*unsharded, *(grad for each in sharded.values() for grad in each)]
    if _core.on_gpu([grad.contiguous() for grad in grads]):
        norm: float | Tensor = _norm_on_gpu(sharded, unsharded, float(norm_type))
    else:
        norm = _norm(sharded, unsharded, float(norm_type))
    if error_if_nonfinite and not math.isfinite(norm):  # waits for a GPU
        raise RuntimeError(
            f"the total norm of order {norm_type} for gradients is {norm}, so they cannot be "
            "clipped: pass error_if_nonfinite=False to scale them anyway"
        )
    dtype = functools.reduce(torch.promote_types, (g.dtype for g in grads), torch.float32)
    if isinstance(norm, Tensor):
        return norm.to(dtype)
    return torch.tensor(norm, dtype=dtype, device=grads[0].device)


def _norm_on_gpu(
    sharded: dict[_core.Engine, list[Tensor]], unsharded: Sequence[Tensor], norm_type: float
) -> Tensor:
    """As _norm(), without waiting for the GPU: returns a float64 number there."""
    exponent = norm_type if math.isinf(norm_type) else 2.0  # how ranks' shares are combined
    parts = [_power_sum_on_gpu(unsharded, norm_type, 0)[0]] if unsharded else []
    for engine, grads in sharded.items():  # in list order, the same on all ranks
        room = _power_sum_on_gpu(grads, norm_type, _core.gpu_ranks(engine))
        _core.queue_over_ranks(engine, exponent, room)
        parts.append(room[0])
    total = parts[0].clone()  # a clone, to free the larger buffer while the norm lives
    for part in parts[1:]:
        total = torch.maximum(total, part) if math.isinf(norm_type) else total + part
    return total if math.isinf(norm_type) else total.pow(1 / norm_type)


def _power_sum_on_gpu(tensors: Sequence[Tensor], norm_type: float, more: int) -> Tensor:
    """Return float64 memory: its first number becomes the sum of |x|**norm_type, or the largest
    |x|, and `more` numbers fit behind it."""
    there = tensors[0].device
    if norm_type in (1.0, 2.0, math.inf):
        size = max(_core.norm_room() + 2 * len(tensors), 1 + more)
        room = torch.empty(size, dtype=torch.float64, device=there)
        _core.queue_power_sum([t.contiguous() for t in tensors], norm_type, room)
        return room
    room = torch.zeros(1 + more, dtype=torch.float64, device=there)
    for tensor in tensors:
        room[0] += tensor.double().abs().pow(norm_type).sum()
    return room


def _norm(
    sharded: dict[_core.Engine, list[Tensor]], unsharded: Sequence[Tensor], norm_type: float
) -> float:
    """Return the norm over all ranks' shares of sharded gradients, and unsharded ones once."""
    owner = _owner_of_norms()
    if owner is not None:
        owner.check_norm(norm_type)
        if norm_type == 2:
            return _exact_norm(sharded, unsharded)
    total = power_sum(unsharded, norm_type)
    for engine, grads in sharded.items():  # in list order, the same on all ranks
        total = added(norm_type, (total, norm_over_ranks(engine, grads, norm_type)))
    return total if math.isinf(norm_type) else total ** (1 / norm_type)


@PublicCall("clip_grad_norm_()")
def _exact_norm(sharded: dict[_core.Engine, list[Tensor]], unsharded: Sequence[Tensor]) -> float:
    """Round once, whichever ranks have which gradients."""
    total = _core.squares([grad.contiguous() for grad in unsharded])
    for engine, grads in sharded.items():
        share = engine.sum_over_ranks(_core.squares([grad.contiguous() for grad in grads]))
        total = [a + b for a, b in zip(total, share, strict=True)]
    return math.sqrt(_core.squares_value(total))


def _owner_of_norms() -> Extension | None:
    """Return the extension for which no norm may depend on the number of ranks."""
    return next((each for each in EXTENSIONS if each.exact_norms()), None)


@PublicCall("clip_grad_norm_()")
def norm_over_ranks(engine: _core.Engine, grads: Sequence[Tensor], norm_type: float) -> float:
    """Return the sum over all ranks of |x|**norm_type, or for inf the largest |x|, of gradients of
    one model. Collective."""
    if norm_type == 2:
        dense = [grad.contiguous() for grad in grads]
        return _core.squares_value(engine.sum_over_ranks(_core.squares(dense)))
    part = power_sum(grads, norm_type)
    over_ranks = engine.max_over_ranks if math.isinf(norm_type) else engine.sum_over_ranks
    return over_ranks([part])[0]


def power_sum(tensors: Sequence[Tensor], norm_type: float) -> float:
    """Return the sum of |x|**norm_type in double precision; for inf the largest |x|, or NaN."""
    plain = [t for t in tensors if t.layout == torch.strided and t.device.type in ("cpu", "cuda")]
    if len(plain) == len(tensors) and norm_type in (1.0, 2.0, math.inf):
        return float(_core.power_sum([t.contiguous() for t in tensors], norm_type))
    total = 0.0
    for tensor in tensors:
        _core.apply_pending(tensor, False)
        total = added(norm_type, (total, power_sum_of(tensor, norm_type)))
    return total
