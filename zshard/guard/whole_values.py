"""Full values of sharded tensors, and norms over all ranks, by name.

A shard knows its elements (its Part), so ranks exchange these ranges, and then each sends its
elements in turn. All calls are collective: all ranks make them for the same tensors in the same
order.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from zshard import _core
from zshard._errors import ShardError
from zshard.guard.plain import plain, to_local
from zshard.guard.words import no_history
from zshard.ranks.agreement import PublicCall, check_agreement, gather, gather_bytes
from zshard.units.extensions import EXTENSIONS
from zshard.units.moment import ELSEWHERE, refuse
from zshard.units.open_forwards import is_forward_open
from zshard.units.shards import Part, part_of
from zshard.units.units import unsharded


def full_numel(param: Tensor) -> int:
    """Return the number of elements of the full parameter."""
    info = _core.shard_info(param)
    return param.numel() if info is None else math.prod(info["shape"])


@PublicCall("full_tensor()")
def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a sharded parameter, gradient or optimizer state, on its device.

    Args:
        tensor: a sharded parameter (`p`, `p.data`), its `.grad`, or the result of elementwise
            operations on them. For any other tensor, a detached copy is returned.

    Returns a new plain tensor of the parameter's full shape, without autograd history. Collective:
    call it on all ranks, for the same tensors in the same order. But over shm, any rank may call it
    alone for a parameter.

    Raises ShardError within a forward with gradients, for a parameter that needs a gradient, also
    where it is not sharded; DivergenceError if the ranks call it for different tensors, PeerError
    if a rank exited.
    """
    _refuse_in_forward(tensor)
    part = _part_of(tensor)
    if part is None:
        return to_local(tensor).detach().clone()
    return joined(tensor, part)


def _refuse_in_forward(tensor: Tensor) -> None:
    """Raise ShardError where a result without autograd history would silently drop out of a
    loss."""
    part = part_of(tensor) if torch.is_grad_enabled() and tensor.requires_grad else None
    unit = None if part is None else part.unit
    if part is not None and unit is not None and is_forward_open(unit):
        raise ShardError(no_history(part.name))


def _part_of(tensor: Tensor, param: Tensor | None = None) -> Part | None:
    """Return the Part of a shard, also of a parameter whose class is not torch's, which is not
    guarded. param: the parameter whose gradient `tensor` is."""
    part: Part | None = _core.slice_part(tensor)
    state = None if part is None else part.state
    if part is not None and state is not None and part.is_own(state.unit, to_local(tensor)):
        refuse([state], f"read the full '{part.name}'", ELSEWHERE)
    own = part_of(tensor if param is None else param) if part is None else None
    if own is None or not own.is_cut or own.shards.world == 1 or own.is_whole_now():
        return part
    return own


def joined(tensor: Tensor, part: Part) -> Tensor:
    """Return the full tensor of a shard, on its device. Collective."""
    local = to_local(tensor)
    unit = part.unit
    is_own = part.root is part and unit is not None and unit.is_slice(part.index, local)
    if _core.shares_state(part.shards) and unit is not None and is_own:
        with unsharded(unit), torch.inference_mode(False):
            whole = torch.empty(part.shape, dtype=local.dtype)
            unit.read_param(part.index, whole)
            return whole
    check_agreement(
        part.comm, [(f"the tensor of '{part.name}'", str(local.dtype))], "tensors of full_tensor()"
    )
    ranges = [(begin, numel) for begin, numel in gather(part.comm, (part.begin, part.numel))]
    return join(part, local, ranges).to(local.device)


@plain()
def join(part: Part, value: Tensor, ranges: list[tuple[int, int]], keep: bool = True) -> Tensor:
    """Return one full tensor, in host memory, from its shards. Rank r has ranges[r], that is,
    `numel` elements from `begin` on; the first rank that has a shard sends it. Without `keep` the
    result is empty. Collective."""
    numels = dict(reversed([(begin, numel) for begin, numel in ranges if numel > 0]))
    if sum(numels.values()) != part.whole_numel:
        raise RuntimeError(
            f"the ranks' shards of '{part.name}' do not add up to the full parameter; please "
            "report this"
        )
    whole = torch.empty(part.whole_numel if keep else 0, dtype=value.dtype)
    for begin, numel in sorted(numels.items()):
        root = ranges.index((begin, numel))
        piece = whole[begin : begin + numel] if keep else torch.empty(numel, dtype=value.dtype)
        if root == part.comm.rank:
            piece.copy_(value.detach().reshape(-1))
        part.comm.broadcast(piece, root)
    return whole.view(part.shape) if keep else whole


def whole_named_parameters(
    model: nn.Module, grads: bool = False
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the name and the full value of each parameter, one at a time: for histograms and logs.

    Args:
        model: a model, sharded or not.
        grads: yield whole gradients instead; None where a parameter has none. A gradient that
            no_sync() has accumulated is this rank's.

    Tensors are new, of the full shape, without autograd history, on the parameter's device.
    Collective: run the loop to its end on all ranks. But over shm, any rank may run it alone for
    parameters. Raises what full_tensor() does.
    """
    for name, param in model.named_parameters():
        value = param.grad if grads else param
        if not grads:
            _refuse_in_forward(param)
        part = None if value is None else _part_of(value, param)
        if value is None or part is None:
            yield name, None if value is None else to_local(value).detach().clone()
        else:
            with PublicCall("whole_named_parameters()"):
                whole = joined(value, part)
            yield name, whole


@PublicCall("named_norms()")
def named_norms(model: nn.Module, norm_type: float = 2.0, grads: bool = False) -> dict[str, float]:
    """Return the norm of each full parameter, by name, without unsharding any.

    Args:
        model: a model, sharded or not.
        norm_type: the order of the norm, a positive number or inf. Default: 2.0.
        grads: return the norms of the gradients instead, of the parameters that have one.

    Norms are summed in double precision, and those of order 2 on CPUs are rounded once, so they do
    not depend on the number of ranks. Collective: call it on all ranks.

    Raises ValueError if `norm_type` is not positive; PeerError if a rank exited;
    NotImplementedError for orders other than 2 and inf with deterministic="any-world".
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be a positive number or inf, got {norm_type}")
    for each in EXTENSIONS:
        each.check_norm(norm_type)
    values = {name: param.grad if grads else param for name, param in model.named_parameters()}
    held = {name: value for name, value in values.items() if value is not None}
    for value in held.values() if grads else ():
        _core.grad_owner(value)  # raises for gradients that are not reduced
    own = {name: to_local(value).detach() for name, value in held.items()}
    once = norm_type == 2 and all(_is_plain(value) for value in own.values())
    sums = {name: _sum_of(value, norm_type, once) for name, value in own.items()}
    cut: dict[_core.Comm, list[str]] = {}
    for name, param in model.named_parameters():
        part = _part_of(held[name], param) if name in held else None
        if part is not None:
            cut.setdefault(part.shards, []).append(name)
    for comm, names in cut.items():
        mine = array("d", (number for name in names for number in sums[name])).tobytes()
        add = _largest if math.isinf(norm_type) else sum
        numbers = iter([add(each) for each in zip(*_numbers_of(comm, mine), strict=True)])
        for name in names:
            sums[name] = list(itertools.islice(numbers, len(sums[name])))
    if once:
        return {name: math.sqrt(_core.squares_value(total)) for name, total in sums.items()}
    order = 1.0 if math.isinf(norm_type) else norm_type
    return {name: total ** (1 / order) for name, (total,) in sums.items()}


def _numbers_of(comm: _core.Comm, mine: bytes) -> list[array[float]]:
    """Return all ranks' numbers, in rank order."""
    return [array("d", data) for data in gather_bytes(comm, mine)]


def _largest(numbers: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


def _is_plain(value: Tensor) -> bool:
    is_dense = value.layout == torch.strided and value.is_floating_point()
    return is_dense and value.device.type == "cpu"


def _sum_of(values: Tensor, norm_type: float, once: bool) -> list[float]:
    """Return the sum of |x|**norm_type, or the largest |x|. once: as numbers that are exact."""
    return _core.squares([values.contiguous()]) if once else [_power_sum(values, norm_type)]


def _power_sum(values: Tensor, norm_type: float) -> float:
    if math.isinf(norm_type):
        return float(values.abs().max()) if values.numel() else 0.0
    return float(values.double().abs().pow(norm_type).sum())
