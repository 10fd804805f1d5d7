"""load_state_dict() of optimizers: as torch's, but each rank loads its shards, in memory where a
step updates parameters together. State that does not fit the parameters, or what the optimizer
declares (InOneCall.state_layout), is refused before anything changes.

Values may be Pending: those of files, for zshard.load(), which reads shards after the optimizers of
all ranks have accepted memory for them; or those that this rank has read, ReadState.
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_with_path

from zshard.guard.slices import plain
from zshard.optim import sharded_state
from zshard.optim.hooks import know
from zshard.optim.sharded_state import OF_CODES, SCALARS, SCALES, copied
from zshard.optim.step import InOneCall
from zshard.state.source import Copy, LoadPlan, filled, planned_state, shard_of
from zshard.state.stand_ins import Pending
from zshard.units import returned
from zshard.units.extensions import refuse_writes
from zshard.units.shards import Part, part_of, units_stepped_by
from zshard.units.units import writing

_torchs_load = Optimizer.load_state_dict


@functools.wraps(_torchs_load)
def load(self: Optimizer, state_dict: dict[str, Any]) -> None:
    """Do what torch's does, with its checks, rules and hooks, but load this rank's shards."""
    returned.note_used(returned.tensors_in(state_dict.get("state")))
    is_sharded, todo = has_parts(self), planned_state.get()
    if todo is None and not (is_sharded or hasattr(self, "state_layout")):
        _torchs_load(self, state_dict)
        return
    refuse_writes(units_stepped_by(self), "the optimizer's load_state_dict()")
    with writing(units_stepped_by(self)):  # a rank that reads gets all of it, or nothing
        given = state_dict.copy()
        for change in self._optimizer_load_state_dict_pre_hooks.values():
            changed = change(self, given)
            given = given if changed is None else changed
        groups = _groups_to_load(self.param_groups, copy.deepcopy(given["param_groups"]))
        problems = problems_with(self, given)
        if problems:
            raise ValueError("\n".join(["the state dict does not match the optimizer:", *problems]))
        undo, state = undo_of(self), _state_to_load(self, given, todo)
        if todo is not None:
            todo.undo.append((self, undo))
        try:
            self.__setstate__({"state": state, "param_groups": groups})
        except BaseException:  # torch's asks for a step, which another optimizer's state lacks
            undo()
            raise
        run_post_hooks(self)
        if is_sharded:
            know(self, is_loaded=True)


InOneCall.load_state_dict = load  # type: ignore[method-assign] # even where torch is unchanged


def undo_of(optimizer: Optimizer) -> Callable[[], None]:
    """Return a function that gives an optimizer the state and the options that it has now."""
    state, entries, groups = optimizer.state, dict(optimizer.state), optimizer.param_groups
    options = [(group, dict(group)) for group in groups]

    def undo() -> None:
        state.clear()
        state.update(entries)
        optimizer.state, optimizer.param_groups = state, groups
        for group, values in options:
            group.clear()
            group.update(values)

    return undo


def has_parts(optimizer: Optimizer) -> bool:
    return any(part_of(param) is not None for param in sharded_state.params_of(optimizer))


def _groups_to_load(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> Any:
    """Return the saved param groups with the optimizer's parameters. Raises torch's errors."""
    if len(groups) != len(saved):
        raise ValueError("loaded state dict has a different number of parameter groups")
    for own, group in zip(groups, saved, strict=True):
        if len(own["params"]) != len(group["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of "
                "optimizer's group"
            )
        names = {"param_names": own["param_names"]} if "param_names" in own else {}
        group.update({**names, **group, "params": own["params"]})
    return saved


class ReadState(Pending):
    """Stands in for state that this rank has read, in hooks. `origin` is its shard."""

    keeps_dtype = True

    def part(self, begin: int, shape: tuple[int, ...]) -> Pending:
        raise RuntimeError(f"cannot index {self.complaint()}")


class _Param(NamedTuple):
    """A parameter that gets state."""

    number: Any  # in the state dict
    tensor: Tensor
    part: Part | None
    options: Mapping[str, Any]  # of its param group, when that is loaded
    layout: Mapping[str, torch.dtype | None]  # what the optimizer declares of its state

    @property
    def name(self) -> str:
        return str(self.number) if self.part is None else f"'{self.part.name}'"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape) if self.part is None else self.part.shape

    def keeps_dtype(self, value: Tensor) -> bool:
        """Return whether its state has dtypes of its own, by declaration or in the file."""
        return any(self.layout.values()) or getattr(value, "keeps_dtype", False)

    def dtype_of(self, value: Tensor) -> torch.dtype:
        """Return what torch casts its state to: floating-point parameters' has their dtype."""
        is_cast = self.tensor.is_floating_point() and not self.keeps_dtype(value)
        return self.tensor.dtype if is_cast else value.dtype

    def moved(self, key: Any, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor in its state where torch has it, as this dtype; not the step."""
        if key == "step":
            is_on_gpu = self.options.get("capturable") or self.options.get("fused")
            return value.to(self.tensor.device, torch.float32) if is_on_gpu else value
        return value.to(self.tensor.device, dtype)

    def copied(self, path: Sequence[Any], value: Any) -> Any:
        """Return a copy of a value within a list or dict."""
        if not isinstance(value, Tensor):
            return value
        key = getattr(path[-1], "key", None) if path else None
        return self.moved(key, value.detach().clone(), self.dtype_of(value))


def _states_in(
    optimizer: Optimizer, given: Mapping[str, Any]
) -> list[tuple[_Param, Mapping[Any, Any]]]:
    """Return the optimizer's parameters in its order, each with what a state dict has for it."""
    found = []
    for own, saved in zip(optimizer.param_groups, given["param_groups"], strict=True):
        options = {**own, **saved}
        for number, tensor in zip(saved["params"], own["params"], strict=True):
            layout = sharded_state.declared(optimizer, options, tensor)
            state = given["state"].get(number)
            param = _Param(number, tensor, part_of(tensor), options, layout)
            found.append((param, state if isinstance(state, Mapping) else {}))
    return found


class LoadEntry(NamedTuple):
    """A tensor of a parameter's state, which this rank loads."""

    param: _Param
    key: Any
    full: Tensor
    part: Part | None  # this rank's shard of it; None: it loads all of it

    @property
    def own(self) -> Tensor:
        """Return what this rank loads of it."""
        return self.full if self.part is None else shard_of(self.part, self.full)

    def fits(self, place: object) -> bool:
        """Return whether what this rank loads can be read into existing memory."""
        param = self.param
        return (
            isinstance(place, Tensor)
            and not any(param.layout.values())
            and place.shape == self.own.shape
            and (place.dtype, place.device) == (param.dtype_of(self.full), param.tensor.device)
            and not torch.is_inference(place)
        )


def entries_to_load(optimizer: Optimizer, given: Mapping[str, Any]) -> list[LoadEntry]:
    """Return the tensors in a state dict's state of parameters, from shapes alone.

    A full tensor is loaded as its parameter is sharded; a WholeMatrix takes full tensors. The
    parameters are resharded, as between steps; Part.reshard() documents what it raises.
    """
    entries = []
    states = _states_in(optimizer, given)
    scalars = sharded_state.scalar_keys((param.shape, own) for param, own in states)
    for param, own in states:
        if param.part is not None:
            param.part.reshard()
        whole = None if sharded_state.takes_full_state(optimizer) else param.part
        for key, value in own.items():
            if isinstance(value, Tensor):
                part = whole and sharded_state.part_of_state(whole, key, value, scalars, True)
                entries.append(LoadEntry(param, key, value, part))
    return entries


@torch.inference_mode(False)
@torch.no_grad()
@plain()
def read_entries(
    optimizer: Optimizer,
    entries: Sequence[LoadEntry],
    todo: LoadPlan | None = None,
) -> list[tuple[LoadEntry, Tensor]]:
    """Return each with what this rank loads, in memory of its own. That of shards is adjacent for
    each key, so that a step updates it as one run.

    todo: gets the copies to shards, which have memory only: the optimizer's state, where that of
    all fits.
    """
    found: dict[int, Tensor] = {}
    alike: dict[Any, list[int]] = {}
    used: set[int] = set()
    for at, each in enumerate(entries):
        if isinstance(each.full, ReadState):
            found[at] = each.full.origin
        elif each.part is None or each.key == "step":
            found[at] = filled(each.own)
        else:
            alike.setdefault((each.key, each.param.dtype_of(each.full)), []).append(at)
    for (key, dtype), members in alike.items():
        tensors = [entries[at].param.tensor for at in members]
        places = [optimizer.state.get(tensor, {}).get(key) for tensor in tensors]
        pointers = [p.data_ptr() for p in places if isinstance(p, Tensor) and p.numel() > 0]
        is_shared = len({*used, *pointers}) < len(used) + len(pointers)  # by two of its tensors
        used.update(pointers)
        fit = map(LoadEntry.fits, [entries[at] for at in members], places)
        if todo is None or is_shared or not all(fit):
            places = sharded_state.zeros_side_by_side(tensors, dtype, SCALES.get(key, 1))
        for at, place in zip(members, places, strict=True):
            found[at] = place
            if todo is None or any(entries[at].param.layout.values()):  # which may convert it
                Copy(place, entries[at].own).carry_out()
            else:
                todo.copies.append(Copy(place, entries[at].own))
    return [(each, found[at]) for at, each in enumerate(entries)]


@torch.inference_mode(False)
@torch.no_grad()
@plain()
def _state_to_load(
    optimizer: Optimizer, given: Mapping[str, Any], todo: LoadPlan | None
) -> dict[Any, Any]:
    entries = entries_to_load(optimizer, given)
    params = {param.number: param for param, _ in _states_in(optimizer, given)}
    state: dict[Any, Any] = defaultdict(dict)
    for number, own in given["state"].items():
        if number not in params:
            state[number] = copied(own)
            continue
        if isinstance(own, Mapping):
            own = {key: None if isinstance(v, Tensor) else v for key, v in own.items()}
        state[params[number].tensor] = tree_map_with_path(params[number].copied, own)
    for each, value in read_entries(optimizer, entries, todo):
        moved = each.param.moved(each.key, value, each.param.dtype_of(each.full))
        state[each.param.tensor][each.key] = moved
    return state


def run_post_hooks(optimizer: Optimizer) -> None:
    """Call the hooks after load_state_dict(), or leave that to zshard.load()."""
    hooks = optimizer._optimizer_load_state_dict_post_hooks.values()
    calls, todo = [functools.partial(hook, optimizer) for hook in hooks], planned_state.get()
    if todo is not None:
        todo.calls += calls
    for call in calls if todo is None else ():
        call()


# --- what does not fit ----------------------------------------------------------------------------


def problems_with(
    optimizer: Optimizer, given: Mapping[str, Any], same_dtypes: bool = False
) -> list[str]:
    """Return what is wrong with the state of parameters in a state dict: what the optimizer
    declares must be there; tensors of sharded parameters must be full or 0-dimensional.

    same_dtypes: full ones must have the parameter's dtype, to which torch would silently cast them.
    """
    if sharded_state.takes_full_state(optimizer):  # which may have state of any shape
        return []
    states = _states_in(optimizer, given)
    takes_codes = getattr(optimizer, "scale_group", 1) > 1
    if not takes_codes and any(SCALES.keys() & own for _, own in states):
        return [
            f"it has 8-bit moments, which this {type(optimizer).__name__} does not step: load it "
            "into an optimizer with the options of the one that saved it, or convert it with "
            "zshard.AdamW8bit.to_fp32(state_dict)"
        ]
    return [
        f"'{key}' of parameter {param.name} {text}"
        for param, own in states
        for key, text in _misfits(param, own, same_dtypes)
    ]


def _misfits(param: _Param, own: Mapping[Any, Any], same: bool) -> Iterator[tuple[Any, str]]:
    """Yield what is wrong with a parameter's state, by key."""
    layout, part = param.layout, param.part
    tensors = {key: value for key, value in own.items() if isinstance(value, Tensor)}
    if tensors or (own and "step" in layout):  # a script may have put numbers
        needed = (key for key in layout if key not in OF_CODES)
        yield from ((key, "is missing") for key in needed if own.get(key) is None)
    for scale in SCALES:
        name = scale.removesuffix("_scale")
        codes = tensors.get(name) if name in layout else None
        if codes is not None and (codes.dtype == torch.uint8) is (own.get(scale) is None):
            yield scale, "is there without 8-bit codes" if scale in tensors else "is missing"
    for key, value in tensors.items():
        is_declared = key in layout and key not in SCALARS
        expected, shape = sharded_state.shape_of_state(param.shape, key), tuple(value.shape)
        if not is_declared and (part is None or not part.is_cut):
            continue
        if is_traceable_wrapper_subclass(value):
            yield key, f"is a {type(value).__name__}: pass a plain tensor (full_tensor())"
        elif shape != expected and (is_declared or shape != ()):
            other = "" if is_declared else " or (): keep other state under no parameter's key"
            yield key, f"has shape {shape}, expected {expected}{other}"
        dtype = layout.get(key)
        if dtype is None and same and part is not None and not param.keeps_dtype(value):
            dtype = part.dtype if shape == expected != () else None
        elif key not in OF_CODES and (value.is_floating_point() or value.dtype == torch.uint8):
            dtype = None  # the optimizer converts moments
        if dtype not in (None, value.dtype):
            yield key, f"has dtype {value.dtype}, expected {dtype}"
