"""An optimizer's state over shards: which tensors are sharded, and their layout in memory.

Shapes determine what is sharded: a tensor with the shape of a parameter's shard is a shard of a
tensor with the parameter's shape.

State tensors of one name are adjacent in one block, spaced like the parameters. Where parameters
are adjacent in a shard, so is their state, and the C loop updates all of them as one run.

An optimizer may be older than its sharded model and have full state, from a snapshot or from steps
of the plain model. Before its first step, or where all ranks save it, each rank keeps its shard of
that state. Until then the state stays full, so that one rank alone can read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from zshard import _core
from zshard.guard.slices import guard_like, plain, slices_among
from zshard.ranks.agreement import Fact
from zshard.units.shards import Entry, Part, part_of

SCALARS = frozenset(("step", "eta", "mu", "mu_product"))
"""State that torch's optimizers keep as one number per parameter. Used only if shapes are
ambiguous: for parameters that have no dimensions themselves."""

_ALIGN = 32
"""Elements: parameters in a shard begin at multiples of it (csrc/base/layout.h)."""

_LINE = 64  # bytes: moved tensors begin at multiples of it

SCALES = dict.fromkeys(("exp_avg_scale", "exp_avg_sq_scale", "momentum_buffer_scale"), 32)
"""The scales of 8-bit moments, each flat with one element for so many of the parameter's. Known by
name: a wrapper has the state of another optimizer, but not its methods."""

OF_CODES = frozenset((*SCALES, "low_bits"))
"""State that an 8-bit optimizer adds to the 32-bit state it is converted from."""


def params_of(optimizer: Optimizer) -> Iterable[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def declared(
    optimizer: Optimizer, group: Mapping[str, Any], param: Tensor
) -> Mapping[str, torch.dtype | None]:
    """Return what a zshard optimizer declares of a parameter's state (InOneCall.state_layout)."""
    declare = getattr(optimizer, "state_layout", None)
    return {} if declare is None else cast(dict[str, Any], declare(group, param))


def bytes_declared(
    layout: Mapping[str, torch.dtype | None], param: nn.Parameter, numel: int
) -> int:
    """Return the bytes of declared state, without counters. See SizeOf."""
    return sum(
        -(-numel // SCALES.get(key, 1)) * (dtype or param.dtype).itemsize
        for key, dtype in layout.items()
        if key not in SCALARS
    )


def takes_full_state(optimizer: Optimizer) -> bool:
    """Return whether it keeps the full state of some parameters, not of shards: WholeMatrix."""
    return getattr(optimizer, "takes_full_state", False)


def class_of_state(optimizer: Optimizer) -> type[Optimizer]:
    """Return the class whose state it keeps: WholeMatrix has that of another one."""
    known: Any = optimizer
    return known.optimizer_class if takes_full_state(optimizer) else type(optimizer)


# --- what is sharded ------------------------------------------------------------------------------


def scalar_keys(states: Iterable[tuple[tuple[int, ...], Mapping[Any, Any]]]) -> set[Any]:
    """Return the names of state that is one number per parameter, from the shapes of the parameters
    and their state. They resolve 0-dimensional state of a 0-dimensional parameter."""
    found: set[Any] = set(SCALARS)
    for shape, entries in states:
        for key, value in entries.items():
            if shape != () and isinstance(value, Tensor) and value.dim() == 0:
                found.add(key)
    return found


class HeldState(NamedTuple):
    """A sharded parameter with its state on this rank, sorted by name."""

    param: Tensor
    part: Part
    state: Mapping[Any, Any]
    shards: Mapping[Any, Entry]  # the tensors in `state` that are sharded

    @property
    def nested(self) -> str | None:
        """Return the first entry with sharded tensors inside a list or dict, or None."""
        for key, value in self.state.items():
            leaves = [] if isinstance(value, Tensor) else tree_leaves(value)
            if self.part.shape != () and any(part_of_state(self.part, "", e) for e in leaves):
                return f"'{key}' (a {type(value).__name__})"
        return None

    def refuse_nested(self) -> None:
        """Raise RuntimeError if there is one. Call it if the other ranks also have one: on one rank
        alone, a shape may match by chance."""
        if self.nested is not None:
            raise RuntimeError(
                f"{self.nested} in the optimizer's state of '{self.part.name}' contains sharded "
                "tensors, which state_dict() cannot gather: store each tensor directly under its "
                "own key"
            )

    @property
    def fact(self) -> Fact:
        """Return the values that must be equal on all ranks."""
        words = [f"{key} {_described(v, key in self.shards)}" for key, v in self.state.items()]
        about = f"the state of '{self.part.name}' (shape {self.part.shape})"
        return about, ", ".join(words) or "none"


@plain()
def held_by(optimizer: Optimizer, params: Iterable[Tensor] | None = None) -> list[HeldState]:
    """Return the sharded parameters of the optimizer, or those of `params`, in their order, also
    those without state."""
    params = params_of(optimizer) if params is None else params
    state = optimizer.state
    cut = [(param, part) for param in params if (part := part_of(param)) and part.is_cut]
    states = [(param, part, entries_of(state, param)) for param, part in cut]
    scalars = scalar_keys((part.shape, entries) for _, part, entries in states)
    held = []
    for param, part, entries in states:
        shards: dict[Any, Entry] = {}
        for key, value in entries.items():
            own = part_of_state(part, key, value, scalars)
            if own is not None:
                shards[key] = Entry(f"{part.name}.{key}", own.shape, value.dtype, value, own)
        ordered = {key: entries[key] for key in sorted(entries, key=str)}
        held.append(HeldState(param, part, ordered, shards))
    return held


def part_of_state(
    part: Part, key: Any, value: object, scalars: Container[Any] = SCALARS, is_full: bool = False
) -> Part | None:
    """Return which part of a full state tensor a rank has: `value` is that part or, with `is_full`,
    the full tensor. None: it is not sharded, by its shape."""
    own = part.of_groups(SCALES[key]) if key in SCALES else part
    if not isinstance(value, Tensor) or (own.shape == () and key in scalars):
        return None
    return own if tuple(value.shape) == (own.shape if is_full else own.local_shape) else None


def shape_of_state(shape: tuple[int, ...], key: Any) -> tuple[int, ...]:
    """Return the full shape of the state tensor `key` of a parameter of this shape."""
    return (-(-math.prod(shape) // SCALES[key]),) if key in SCALES else shape


def entries_of(state: Mapping[Any, Any], param: Tensor) -> Mapping[Any, Any]:
    """Return a parameter's state as a copy, since the optimizer's thread may be creating it."""
    entries = state.get(param)
    return dict(entries) if isinstance(entries, Mapping) else {}


def _described(value: object, is_cut: bool) -> str:
    if not isinstance(value, Tensor):
        return f"({type(value).__name__})"
    return f"({value.dtype}{', sharded' if is_cut else f', shape {tuple(value.shape)}'})"


# --- state of no parameter ------------------------------------------------------------------------


def other_state(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the state that an optimizer keeps under keys that are no parameters, such as MADGRAD's
    "k". It is the same on all ranks. Raises RuntimeError, which names the key, if there are shards
    in it: nothing says what they are shards of."""
    other = {}
    for key, value in list(state.items()):
        if isinstance(key, Tensor) and isinstance(value, Mapping):
            continue
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        if slices_among(tensors) or any(map(_core.is_shard, tensors)):
            where = "in the place of a dict" if isinstance(key, Tensor) else f"under {key!r}"
            raise RuntimeError(
                f"the optimizer's state has sharded tensors {where}, which cannot be gathered: "
                "store each in the dict of its parameter, under a key of its own"
            )
        if not isinstance(key, Tensor):
            other[key] = value
    return other


def without_parameters(rest: Mapping[Any, Any], known: Iterable[object]) -> dict[Any, Any]:
    """Return what in `rest`, saved under keys that name no parameter, is no parameter's state, by
    what parameters have, `known`: dicts with the same keys are theirs, under a wrong name. Where
    parameters have nothing, so are dicts with tensors."""
    forms = {frozenset(own) for own in known if isinstance(own, Mapping)}

    def is_of_a_parameter(value: object) -> bool:
        if not isinstance(value, Mapping) or forms:
            return isinstance(value, Mapping) and frozenset(value) in forms
        return any(hasattr(each, "shape") for each in value.values())

    return {
        key: value
        for key, value in rest.items()
        if type(key) is not int and not is_of_a_parameter(value)
    }


def copied(value: object) -> Any:
    """Return a copy of such state, with tensors and containers of its own."""
    return tree_map_only(Tensor, lambda each: each.detach().clone(), value)


def facts_of_other(other: Mapping[Any, Any]) -> list[Fact]:
    return [(f"the state under {key!r}", _described(v, False)) for key, v in other.items()]


# --- memory ---------------------------------------------------------------------------------------


SizeOf = Callable[[nn.Parameter, int], int]
"""Bytes of an optimizer's state, given a full parameter and how many of its elements a rank has."""


def one_tensor(param: nn.Parameter, numel: int) -> int:
    """Return the bytes of one tensor like the parameter's shard."""
    return numel * param.itemsize


def zeros_side_by_side(
    params: Sequence[Tensor], dtype: torch.dtype | None = None, group: int = 1
) -> list[Tensor]:
    """Return a tensor of zeros for each of `params`, of its shape, device and memory format.

    dtype: of the tensors; by default each parameter's. group: return flat tensors instead, with one
    element for each so many elements of the parameter.

    Those for contiguous tensors are views of one block per dtype and device, in the parameters'
    order, with the same gaps where parameters are within a cache line of each other.
    """
    made: dict[int, Tensor] = {}
    blocks: dict[tuple[torch.dtype, torch.device, bool, _core.Comm | None], list[int]] = {}
    """By the parameters' dtype and device, whether it is offloaded, and who can read it."""
    for i, param in enumerate(params):
        if group > 1 or (param.device.type in ("cpu", "cuda") and param.is_contiguous()):
            offloaded = _core.offloads_state(param)
            kind = param.dtype, param.device, offloaded, None if offloaded else _readers_of(param)
            blocks.setdefault(kind, []).append(i)
        else:
            made[i] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    for (of_param, device, offloaded, readers), members in blocks.items():
        starts, length = _places([params[i] for i in members])
        own = of_param if dtype is None else dtype
        if offloaded:
            bytes_ = -(-length // group) * own.itemsize
            block = _core.offloaded_zeros(params[members[0]], -(-bytes_ // of_param.itemsize))
            block = block.view(own)
        elif readers is not None or (device.type == "cpu" and _core.keeps_memory()):
            like = torch.empty(0, dtype=own)
            block = _core.shared_zeros(readers, -(-length // group), like)
        else:
            block = torch.zeros(-(-length // group), dtype=own, device=device)
        for i, start in zip(members, starts, strict=True):
            numel = -(-params[i].numel() // group)
            place = block[start // group : start // group + numel]
            made[i] = place if group > 1 else place.view(params[i].shape)
    if group > 1:
        return [made[i] for i in range(len(params))]
    return [guard_like(made[i], params[i]) for i in range(len(params))]


@torch.inference_mode(False)
@torch.no_grad()
@plain()
def move_together(values: Sequence[Tensor], readers: _core.Comm | None) -> None:
    """Move CPU tensors, which stay the same objects, into one new block that `readers` can read."""
    starts, end = [], 0
    for value in values:
        starts.append(end)
        end += -(-value.numel() * value.element_size() // _LINE) * _LINE
    block = _core.shared_zeros(readers, end, torch.empty(0, dtype=torch.uint8))
    for value, start in zip(values, starts, strict=True):
        own = block[start : start + value.numel() * value.element_size()]
        value.data = own.view(value.dtype).view(value.shape).copy_(value.detach())


def _readers_of(param: Tensor) -> _core.Comm | None:
    """Return the transport over which ranks can read its state; None: it is private."""
    part = part_of(param)
    if part is None or part.peers is None or not part.is_cut:
        return None
    return part.shards


def _places(params: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return where each tensor starts in a block with the same spacing, and the block's length.

    In elements. Tensors that are not adjacent in memory start at a multiple of _ALIGN elements.
    """
    starts: list[int] = []
    at, end = 0, None
    for param in params:
        item = param.element_size()
        gap = -1 if end is None else param.data_ptr() - end
        if 0 <= gap < _ALIGN * item and gap % item == 0:
            at += gap // item
        else:
            at = -(-at // _ALIGN) * _ALIGN
        starts.append(at)
        at += param.numel()
        end = param.data_ptr() + param.numel() * item
    return starts, at


# --- full state from before the model was sharded -------------------------------------------------


def full_state_of(optimizer: Optimizer) -> dict[Any, list[tuple[Tensor, Part]]]:
    """Return what is full in the state of sharded parameters: by key, each parameter with the part
    that this rank is to keep."""
    full: dict[Any, list[tuple[Tensor, Part]]] = {}
    for param in params_of(optimizer):
        part = part_of(param) if param in optimizer.state else None
        if part is None or not part.is_cut:
            continue
        for key, value in optimizer.state[param].items():
            own = part_of_state(part, key, value, is_full=True)
            if own is not None:
                full.setdefault(key, []).append((param, own))
    return full


@torch.inference_mode(False)
@torch.no_grad()
@plain()
def shard_state_of(optimizer: Optimizer) -> None:
    """Shard full state of sharded parameters. Not collective: each rank takes its shard of its own
    state, with which it would continue under DDP."""
    for key, found in full_state_of(optimizer).items():
        old = [(param, part.of(optimizer.state[param][key])) for param, part in found]
        for dtype in dict.fromkeys(value.dtype for _, value in old):
            alike = [(param, value) for param, value in old if value.dtype == dtype]
            params = [param for param, _ in alike]
            places = zeros_side_by_side(params, dtype, SCALES.get(key, 1))
            for (param, value), place in zip(alike, places, strict=True):
                optimizer.state[param][key] = place.copy_(value)
