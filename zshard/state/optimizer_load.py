"""load_state_dict() of optimizers over sharded parameters: what torch's does, with shards.

It has torch's checks, hooks, errors and rules of dtypes, and a full tensor becomes this rank's
shard, in memory where a step updates parameters together. State that does not fit what the
optimizer declares (InOneCall.state_layout), or parameters that are sharded, changes nothing.

Values may be Pending: zshard.load() passes those of files, and reads shards into place after the
optimizer has accepted their memory (LaterReads).
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_with_path

from zshard.guard.slices import plain
from zshard.optim.hooks import know
from zshard.optim.sharded_state import (
    OF_CODES,
    SCALARS,
    SCALES,
    copied,
    declared,
    params_of,
    part_of_state,
    scalar_keys,
    shape_of_state,
    takes_full_state,
    zeros_side_by_side,
)
from zshard.optim.step import InOneCall
from zshard.state.source import Copy, Source, shard_of
from zshard.state.stand_ins import Pending
from zshard.units import returned
from zshard.units.shards import Part, part_of, units_stepped_by
from zshard.units.units import refuse_writes, writing

__all__ = [
    *("LaterReads", "entries_to_load", "has_parts", "load", "places_for", "planned_reads"),
    *("problems_with", "run_post_hooks"),
]

_torchs_load = Optimizer.load_state_dict


@functools.wraps(_torchs_load)
def load(self: Optimizer, state_dict: dict[str, Any]) -> None:
    """Do what torch's does, in its order and with its errors, but load this rank's shards."""
    returned.note_used(returned.tensors_in(state_dict.get("state")))
    returned.look()
    is_planned = planned_reads.get() is not None
    if not (is_planned or has_parts(self) or hasattr(self, "state_layout")):
        _torchs_load(self, state_dict)
        return
    refuse_writes(units_stepped_by(self), "the optimizer's load_state_dict()")
    with writing(units_stepped_by(self)):  # a rank that reads gets all of it, or nothing
        given = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, given)
            given = given if changed is None else changed
        groups = _groups_to_load(self, given["param_groups"])
        problems = problems_with(self, given)
        if problems:
            raise ValueError("\n".join(["the state dict does not match the optimizer:", *problems]))
        self.__setstate__({"state": _state_to_load(self, given), "param_groups": groups})
        run_post_hooks(self)
        if has_parts(self):
            know(self, is_loaded=True)


# Those of plain models, too, even where torch is unchanged: their state has dtypes of its own.
InOneCall.load_state_dict = load  # type: ignore[method-assign]


def has_parts(optimizer: Optimizer) -> bool:
    return any(part_of(param) is not None for param in params_of(optimizer))


# --- loading --------------------------------------------------------------------------------------


class _Param(NamedTuple):
    """A parameter that gets state."""

    number: Any  # in the state dict
    tensor: Tensor
    part: Part | None
    group: Mapping[str, Any]  # the options that its param group will have
    layout: Mapping[str, torch.dtype | None]  # what the optimizer declares of its state

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape) if self.part is None else self.part.shape

    def keeps_dtype(self, value: Tensor) -> bool:
        """Return whether its state has a dtype of its own, by declaration or in the file."""
        return any(self.layout.values()) or getattr(value, "keeps_dtype", False)

    def kind(self, key: Hashable, value: Tensor) -> tuple[torch.dtype, torch.device]:
        """Return the dtype and device of loaded state, by torch's rule where it is not kept."""
        param = self.tensor
        if key == "step":
            is_on_gpu = self.group.get("capturable") or self.group.get("fused")
            return (torch.float32, param.device) if is_on_gpu else (value.dtype, value.device)
        is_cast = param.is_floating_point() and not self.keeps_dtype(value)
        return param.dtype if is_cast else value.dtype, param.device

    def cast(self, path: Sequence[Any], value: object) -> object:
        """Return a copy of a tensor in a list or dict; those directly in the state are entries."""
        key = getattr(path[-1], "key", None) if path else None
        if not isinstance(value, Tensor) or (len(path) == 1 and key is not None):
            return value
        dtype, device = self.kind(key, value)
        return value.detach().to(device, dtype, copy=True)


def _states_in(
    optimizer: Optimizer, given: Mapping[str, Any]
) -> list[tuple[_Param, Mapping[Any, Any]]]:
    """Return the optimizer's parameters in its order, each with what a state dict has for it."""
    found = []
    for own, saved in zip(optimizer.param_groups, given["param_groups"], strict=True):
        group = {**own, **saved}
        for number, tensor in zip(saved["params"], own["params"], strict=True):
            layout = declared(optimizer, group, tensor)
            param = _Param(number, tensor, part_of(tensor), group, layout)
            state = given["state"].get(number)
            found.append((param, state if isinstance(state, Mapping) else {}))
    return found


class Entry(NamedTuple):
    """A tensor of a parameter's state, which this rank loads."""

    number: Any  # of the parameter in the state dict
    param: Tensor
    key: Hashable
    full: Tensor
    part: Part | None  # this rank's shard of it; None: it loads all of it
    dtype: torch.dtype
    device: torch.device
    is_late: bool  # zshard.load() reads it when the optimizer has accepted its memory

    @property
    def own(self) -> Tensor:
        """Return what this rank loads of it."""
        return self.full if self.part is None else shard_of(self.part, self.full)

    @property
    def ready(self) -> Tensor | None:
        """Return the loaded tensor if it needs no memory: to_load() has read it, or the parameter
        belongs to no sharded model; then optimizers share memory with the state dict, as in torch.
        """
        if isinstance(self.full, Pending):
            return None if planned_reads.get() is not None else self.full.origin
        return self.full.to(self.device, self.dtype) if part_of(self.param) is None else None

    def fits(self, place: object) -> bool:
        """Return whether this rank's shard can be read into existing memory."""
        return (
            self.is_late
            and isinstance(place, Tensor)
            and place.shape == self.own.shape
            and (place.dtype, place.device) == (self.dtype, self.device)
            and not torch.is_inference(place)
        )


def entries_to_load(optimizer: Optimizer, given: Mapping[str, Any]) -> list[Entry]:
    """Return the tensors in a state dict's state of parameters, from shapes alone.

    A full tensor is loaded as its parameter is sharded; a WholeMatrix takes full tensors. The
    parameters are resharded, as between steps; Part.settle() documents what it raises.
    """
    states, entries, whole = _states_in(optimizer, given), [], takes_full_state(optimizer)
    for param, _ in states:
        if param.part is not None:
            param.part.settle()
    scalars = scalar_keys((param.shape, own) for param, own in states)
    for param, own in states:
        for key, value in own.items():
            if not isinstance(value, Tensor):
                continue
            part = None
            if param.part is not None and not whole:
                part = part_of_state(param.part, key)
                is_scalar = part.shape == () and key in scalars
                part = None if is_scalar or value.shape != part.shape else part
            is_late = part is not None and key != "step" and not any(param.layout.values())
            kind = (value.dtype, value.device) if whole else param.kind(key, value)
            entries.append(Entry(param.number, param.tensor, key, value, part, *kind, is_late))
    return entries


def places_for(entries: Sequence[Entry], live: Mapping[Any, Any]) -> list[Tensor]:
    """Return memory for the entries: for shards adjacent for each key, so that a step updates it as
    one run, or the existing memory in `live` if it suits all of them."""
    found: dict[int, Tensor] = {}
    alike: dict[Any, list[int]] = {}
    for at, each in enumerate(entries):
        if each.part is None or each.key == "step":
            found[at] = torch.empty(each.own.shape, dtype=each.dtype, device=each.device)
        else:
            alike.setdefault((each.key, each.dtype), []).append(at)
    for (key, dtype), members in alike.items():
        params = [entries[at].param for at in members]
        places = [live.get(param, {}).get(key) for param in params]
        if not all(entries[at].fits(place) for at, place in zip(members, places, strict=True)):
            places = zeros_side_by_side(params, dtype, SCALES.get(key, 1))
        found.update(zip(members, places, strict=True))
    return [found[at] for at in range(len(entries))]


@torch.inference_mode(False)
@torch.no_grad()
@plain()
def _state_to_load(optimizer: Optimizer, given: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the state by parameter. What zshard.load() reads later has only memory."""
    params, later = {p.number: p for p, _ in _states_in(optimizer, given)}, planned_reads.get()
    state: dict[Any, Any] = defaultdict(dict)
    for number, own in given["state"].items():
        if number in params:
            entries = dict(own) if isinstance(own, Mapping) else own
            state[params[number].tensor] = tree_map_with_path(params[number].cast, entries)
        else:
            state[number] = copied(own)
    todo = []
    for each in entries_to_load(optimizer, given):
        state[each.param][each.key] = ready = each.ready
        todo += [each] if ready is None else []
    places = places_for(todo, {} if later is None else optimizer.state)
    for each, place in zip(todo, places, strict=True):
        state[each.param][each.key] = place
        if later is not None and each.is_late:
            later.shards.append((optimizer, each, place))
        else:
            Copy(place, each.own).carry_out(None if later is None else later.source)
    return state


def _groups_to_load(optimizer: Optimizer, saved: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of the param groups, with the optimizer's parameters. Raises torch's errors."""
    groups, own_groups = copy.deepcopy(saved), optimizer.param_groups
    if len(groups) != len(own_groups):
        raise ValueError("loaded state dict has a different number of parameter groups")
    for group, own in zip(groups, own_groups, strict=True):
        if len(group["params"]) != len(own["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of "
                "optimizer's group"
            )
        group["params"] = own["params"]
        if "param_names" in own:
            group.setdefault("param_names", own["param_names"])
    return list(groups)


# --- reading later --------------------------------------------------------------------------------


@dataclass
class LaterReads:
    """What zshard.load() does after load_state_dict(), which gets memory in place of shards."""

    source: Source  # of all that is read at once
    shards: list[tuple[Optimizer, Entry, Tensor]] = field(default_factory=list)
    """With the optimizer that loads each, and its place."""
    hooks: list[Callable[[], object]] = field(default_factory=list)

    def check(self, optimizer: Optimizer) -> None:
        """Raise RuntimeError if a shard has no place in an optimizer's state."""
        lost = [e.key for own, e, at in self.shards if own.state[e.param].get(e.key) is not at]
        lost += [v.label for v in returned.tensors_in(optimizer.state) if isinstance(v, Pending)]
        if lost:
            raise RuntimeError(
                f"zshard.load() cannot read '{lost[0]}' in place: load_state_dict() of "
                f"{type(optimizer).__name__} or one of its hooks replaced it"
            )

    @plain()
    @torch.no_grad()
    def carry_out(self) -> None:
        for _, entry, place in self.shards:
            Copy(place, entry.own).carry_out(self.source)


planned_reads: ContextVar[LaterReads | None] = ContextVar("planned_reads", default=None)
"""Set while zshard.load() calls load_state_dict(), with Pending tensors of files. Those in other
calls are of to_load(): their origin is this rank's shard."""


def run_post_hooks(optimizer: Optimizer) -> None:
    """Call the user's hooks after load_state_dict(), or leave that to zshard.load()."""
    later = planned_reads.get()
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        if later is None:
            hook(optimizer)
        else:
            later.hooks.append(functools.partial(hook, optimizer))


# --- what does not fit ----------------------------------------------------------------------------


def problems_with(
    optimizer: Optimizer, given: Mapping[str, Any], same_dtypes: bool = False
) -> list[str]:
    """Return what is wrong with the state of parameters in a state dict: what the optimizer
    declares must be there; tensors of sharded parameters must be full or 0-dimensional.

    same_dtypes: full ones must have the parameter's dtype, to which torch would silently cast them.
    """
    if takes_full_state(optimizer):  # which may have state of any shape
        return []
    states = _states_in(optimizer, given)
    takes_codes = getattr(optimizer, "scale_group", 1) > 1
    if not takes_codes and any(SCALES.keys() & own for _, own in states):
        return [
            f"it has 8-bit moments, which this {type(optimizer).__name__} does not step: load it "
            "into an optimizer with the options of the one that saved it, or convert it with "
            "zshard.AdamW8bit.to_fp32(state_dict)"
        ]
    problems = []
    for param, own in states:
        name = param.number if param.part is None else f"'{param.part.name}'"
        wrong = list(_missing(param, own))
        wrong += [(key, _misfit(param, key, value, same_dtypes)) for key, value in own.items()]
        problems += [f"'{key}' of parameter {name} {text}" for key, text in wrong if text]
    return problems


def _missing(param: _Param, own: Mapping[Any, Any]) -> Iterator[tuple[Any, str]]:
    """Yield what a step would not find in a parameter's state. A script may have put numbers."""
    if own and ("step" in param.layout or any(isinstance(v, Tensor) for v in own.values())):
        needed = (key for key in param.layout if key not in OF_CODES)
        yield from ((key, "is missing") for key in needed if own.get(key) is None)
    for key in SCALES:
        name = key.removesuffix("_scale")
        is_coded = isinstance(own.get(name), Tensor) and not own[name].is_floating_point()
        if name in param.layout and is_coded is (own.get(key) is None):
            yield key, "is missing" if is_coded else f"is there, but '{name}' has no 8-bit codes"


def _misfit(param: _Param, key: Any, value: object, same_dtypes: bool) -> str:
    """Return what is wrong with an entry of a parameter's state; "" if nothing is."""
    is_declared, part = key in param.layout and key not in SCALARS, param.part
    if not isinstance(value, Tensor) or not (is_declared or part):
        return ""
    expected, shape = shape_of_state(param.shape, key), tuple(value.shape)
    if is_traceable_wrapper_subclass(value):
        return f"is a {type(value).__name__}: pass a plain tensor (full_tensor())"
    if shape != expected and (is_declared or shape != ()):
        return f"has shape {shape}, expected {expected}{'' if is_declared else ' or ()'}"
    dtype = param.layout.get(key)
    if key in OF_CODES:
        is_right = dtype in (None, value.dtype)
    elif dtype is not None:  # the optimizer converts moments
        is_right = value.is_floating_point() or value.dtype == torch.uint8
    else:
        dtype = None if part is None or shape == () or param.keeps_dtype(value) else part.dtype
        is_right = not same_dtypes or dtype in (None, value.dtype)
    return "" if is_right else f"has dtype {value.dtype}, expected {dtype}"
