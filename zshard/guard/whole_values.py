"""Full values of sharded tensors, and norms over all ranks, by name.

A shard knows its elements (its Part), so ranks exchange these ranges, and then each sends its
elements in turn. All calls are collective: all ranks make them for the same tensors in the same
order.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zshard import _core
from zshard._errors import ShardError
from zshard.guard.plain import plain, to_local
from zshard.ranks.agreement import PublicCall, check_agreement, gather, gather_bytes
from zshard.units.extensions import EXTENSIONS
from zshard.units.moment import ELSEWHERE, refuse
from zshard.units.open_forwards import is_forward_open
from zshard.units.shards import Entry, Part, part_of
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
    """Raise ShardError where a result without history would silently drop out of a loss."""
    part = part_of(tensor) if torch.is_grad_enabled() and tensor.requires_grad else None
    state = None if part is None else part.state
    if part is not None and state is not None and is_forward_open(state):
        raise ShardError(
            f"the full tensor of '{part.name}' in a forward has no autograd history, so the "
            "parameter would get no gradient of it: use the parameter itself, or for values, "
            "full_tensor(p.detach())."
        )


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
    """Return the full tensor of a shard. Collective, but over shm not for a parameter."""
    local = to_local(tensor)
    unit = part.unit if part.root is part and _core.shares_state(part.shards) else None
    if unit is not None and not unit.is_slice(part.index, local):
        unit = None
    if unit is None:
        facts = [(f"the tensor of '{part.name}'", str(local.dtype))]
        check_agreement(part.comm, facts, "tensors of full_tensor()")
    entry = Entry(part.name, part.shape, local.dtype, local, part, unit)
    full = new_full(entry)
    read_full([entry], [full])
    return full


def new_full(entry: Entry, device: str | None = None) -> Tensor:
    """Return memory for a full tensor, which callers may write to."""
    with torch.inference_mode(False):
        return torch.empty(entry.shape, dtype=entry.dtype, device=device or entry.value.device)


PlaceAtPeer = tuple[int, int, int, int]
"""A peer's piece of a tensor: the tensor's number, the first element, how many, and where they
lie."""


@plain()
@torch.no_grad()
def read_full(
    entries: Sequence[Entry],
    targets: Sequence[Tensor | None],
    peers: Mapping[int, Sequence[PlaceAtPeer]] | None = None,
) -> None:
    """Copy full tensors into contiguous memory of their shapes, cast to its dtypes. The one way
    from shards to full values.

    targets: None for a tensor that this rank does not want, but takes part in. peers: where other
    ranks have the rest of each tensor in shared memory, by rank.

    Parameters of units come from their units, which are unsharded one after another: over shm, any
    rank may read them alone. Other shards are sent, unless `peers` says where they lie: all ranks
    call it for the same ones.
    """
    pairs = list(zip(entries, targets, strict=True))
    if peers is not None:
        _copy_from(peers, entries, [target.view(-1) for target in targets if target is not None])
        return
    ranges = _ranges_of([entry for entry, _ in pairs if _is_sent(entry)])
    for unit, group in itertools.groupby(pairs, lambda pair: pair[0].unit):
        with contextlib.nullcontext() if unit is None else unsharded(unit):
            for entry, target in group:
                if _is_sent(entry):
                    _send(entry, next(ranges), target)
                elif target is None:
                    continue
                elif unit is not None and entry.part and target.dtype == entry.value.dtype:
                    unit.read_param(entry.part.index, target)
                else:
                    target.copy_(entry.value.detach())


def _is_sent(entry: Entry) -> bool:
    return entry.unit is None and entry.part is not None and entry.part.is_cut


def _ranges_of(sent: Sequence[Entry]) -> Iterator[dict[int, tuple[int, int]]]:
    """Yield for each entry the ranks that send it, with (begin, numel): the first that has a
    shard. One exchange between the same ranks. Raises RuntimeError if elements are missing."""
    parts = [entry.part for entry in sent if entry.part is not None]
    rows: dict[_core.Comm, Iterator[Any]] = {}
    for comm in dict.fromkeys(part.comm for part in parts):
        mine = [(part.begin, part.numel) for part in parts if part.comm is comm]
        rows[comm] = zip(*gather(comm, mine), strict=True)
    for part in parts:
        ranges = [(begin, numel) for begin, numel in next(rows[part.comm])]
        owners = {r: each for r, each in enumerate(ranges) if ranges.index(each) == r and each[1]}
        _check_all_there(part, part.whole_numel - sum(numel for _, numel in owners.values()))
        yield owners


def _copy_from(
    peers: Mapping[int, Sequence[PlaceAtPeer]], entries: Sequence[Entry], flat: Sequence[Tensor]
) -> None:
    parts = [entry.part for entry in entries if entry.part is not None]
    missing = [part.whole_numel - part.numel for part in parts]
    for entry, part, target in zip(entries, parts, flat, strict=True):
        target[part.begin : part.begin + part.numel].copy_(entry.value.detach().reshape(-1))
    for rank, rows in peers.items():
        pieces = [flat[at][begin : begin + numel] for at, begin, numel, _ in rows]
        if parts:
            _core.read_state(parts[0].shards, rank, [place for *_, place in rows], pieces)
        for at, _, numel, _ in rows:
            missing[at] -= numel
    for part, numel in zip(parts, missing, strict=True):
        _check_all_there(part, numel)


def _check_all_there(part: Part, missing: int) -> None:
    """Raise RuntimeError if the ranks' shards lack elements, or some have them twice."""
    if missing != 0:
        raise RuntimeError(
            f"the ranks' shards of '{part.name}' do not add up to the full parameter; please "
            "report this"
        )


def _send(entry: Entry, owners: Mapping[int, tuple[int, int]], target: Tensor | None) -> None:
    """Send the shards of a tensor to all ranks, through host memory."""
    assert entry.part is not None, "it is sharded"
    comm, value = entry.part.comm, entry.value
    full = target
    if target is not None and (target.device.type != "cpu" or target.dtype != value.dtype):
        full = torch.empty(target.numel(), dtype=value.dtype)
    for root, (begin, numel) in owners.items():
        piece = torch.empty(numel, dtype=value.dtype)
        if full is not None:
            piece = full.view(-1)[begin : begin + numel]
        if root == comm.rank:
            piece.copy_(value.detach().reshape(-1))
        comm.broadcast(piece, root)
    if target is not None and full is not None and full is not target:
        target.copy_(full.view(target.shape))


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
    once = norm_type == 2 and all(
        value.layout == torch.strided and value.is_floating_point() and value.device.type == "cpu"
        for value in own.values()
    )
    if once:  # as numbers that are exact
        sums = {name: _core.squares([value.contiguous()]) for name, value in own.items()}
    else:
        sums = {name: [power_sum_of(value, norm_type)] for name, value in own.items()}
    cut: dict[_core.Comm, list[str]] = {}
    for name, param in model.named_parameters():
        part = _part_of(held[name], param) if name in held else None
        if part is not None:
            cut.setdefault(part.shards, []).append(name)
    for comm, names in cut.items():
        mine = array("d", (number for name in names for number in sums[name])).tobytes()
        everyone = [array("d", data) for data in gather_bytes(comm, mine)]
        numbers = iter([added(norm_type, each) for each in zip(*everyone, strict=True)])
        for name in names:
            sums[name] = list(itertools.islice(numbers, len(sums[name])))
    if once:
        return {name: math.sqrt(_core.squares_value(total)) for name, total in sums.items()}
    order = 1.0 if math.isinf(norm_type) else norm_type
    return {name: total ** (1 / order) for name, (total,) in sums.items()}


def added(norm_type: float, sums: Sequence[float]) -> float:
    """Return the sum of what power_sum_of() has returned; for inf the largest, NaN if one is."""
    if not math.isinf(norm_type):
        return sum(sums)
    return math.nan if any(map(math.isnan, sums)) else max(sums)


def power_sum_of(values: Tensor, norm_type: float) -> float:
    """Return the sum of |x|**norm_type in double precision, or the largest |x|."""
    if math.isinf(norm_type):
        return float(values.abs().max()) if values.numel() else 0.0
    return float(values.double().abs().pow(norm_type).sum())
