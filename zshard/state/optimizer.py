"""state_dict() and load_state_dict() of optimizers over sharded parameters: full tensors.

The optimizer state of a sharded parameter is sharded like the parameter. Two torch hooks convert
between that and the state dict. One, after torch's packing and before any hook of the user's,
gathers the shards, a tensor at a time. The other, before torch's loading and after any hook of the
user's, takes this rank's shard of each full tensor. So the result is what the same optimizer over
the unsharded model would save, and it loads under any strategy, at any world size, and into the
unsharded model's optimizer.

Saving is collective; ranks agree first on what to gather. Over shm, however, the saving rank reads
the others' memory (optim/shared_state.py), unless the state is offloaded. Loading is not
collective: each rank has all it needs. This file also plans a load from any source (OptimizerPlan).

Optimizers without parameters of a wrapped model keep torch's behavior.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zshard import _core
from zshard.guard.slices import plain
from zshard.guard.whole_values import join
from zshard.optim.hooks import is_older, know, post
from zshard.optim.sharded_state import (
    HeldState,
    copied,
    fact_of,
    facts_of_other,
    full_state_of,
    held_by,
    hidden,
    layout_of,
    other_state,
    params_of,
    part_of_state,
    problem_with_codes,
    scalar_keys,
    takes_full_state,
    with_own_dtypes,
    zeros_side_by_side,
)
from zshard.optim.shared_state import FullState, read_full
from zshard.ranks.agreement import PublicCall, check_agreement, gather
from zshard.state.source import Copy, Source, filled, shard_of
from zshard.state.stand_ins import Pending
from zshard.units import returned
from zshard.units.moment import refuse_writes
from zshard.units.shards import Part, part_of, units_stepped_by
from zshard.units.units import State, writing

__all__ = ["OptimizerPlan", "gather_state", "install", "problems_with", "taken"]

Numbered = Mapping[Any, Mapping[Any, Any]]
"""State by the parameters' numbers in a state dict: {0: {"exp_avg": tensor, "step": ...}, ...}."""

_torchs_save = Optimizer.state_dict
_torchs_load = Optimizer.load_state_dict


def install() -> None:
    """Make torch's optimizers save and load full tensors. Idempotent."""
    Optimizer.state_dict = _save  # type: ignore[method-assign]
    Optimizer.load_state_dict = _load  # type: ignore[method-assign]


@functools.wraps(_torchs_save)
def _save(self: Optimizer) -> dict[str, Any]:
    if not _has_parts(self):
        return _torchs_save(self)
    with self.register_state_dict_post_hook(_with_full_state, prepend=True):
        packed = _torchs_save(self)
    _note_returned(self, packed)
    return packed


def _note_returned(optimizer: Optimizer, packed: Mapping[str, Any]) -> None:
    """Have lost writes to the copies noticed; other tensors are the optimizer's own."""
    numbers = _numbers(optimizer, packed)
    found: dict[State, dict[str, Tensor]] = {}
    for param in params_of(optimizer):
        part, entries = part_of(param), packed["state"].get(numbers[id(param)])
        state = part.state if part is not None and part.is_cut else None
        own = optimizer.state.get(param, {})
        for key, value in entries.items() if isinstance(entries, Mapping) else ():
            if part is None or state is None or value is own.get(key):
                continue
            if returned.is_plain(value) and value.numel() > 0:
                found.setdefault(state, {})[f"'{key}' of '{part.name}'"] = value
    for state, tensors in found.items():
        said = "optimizer.state_dict()", "optimizer.load_state_dict()"
        returned.note(state, tensors, said)


@functools.wraps(_torchs_load)
def _load(self: Optimizer, state_dict: dict[str, Any]) -> None:
    returned.note_used(returned.tensors_in(state_dict.get("state")))
    returned.look()
    if not _has_parts(self):
        _torchs_load(self, state_dict)
        return
    refuse_writes(units_stepped_by(self), "the optimizer's load_state_dict()")
    with (
        torch.inference_mode(False),  # later steps write to the state
        self.register_load_state_dict_pre_hook(_take_parts),
        writing(units_stepped_by(self)),  # a rank that reads gets all of it, or nothing
    ):
        _torchs_load(self, state_dict)
        know(self)


def _has_parts(optimizer: Optimizer) -> bool:
    return any(part_of(param) is not None for param in params_of(optimizer))


def _numbers(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[int, Any]:
    """Return what a state dict's groups call each parameter, by the parameter's id."""
    listed = (number for group in state_dict["param_groups"] for number in group["params"])
    return {id(p): number for p, number in zip(params_of(optimizer), listed, strict=True)}


# --- saving ---------------------------------------------------------------------------------------


def _with_full_state(optimizer: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
    """Torch's post-hook of state_dict(). gather_state() documents which ranks call it."""
    numbers = _numbers(optimizer, packed)
    whole = {numbers[id(param)]: entries for param, entries in gather_state(optimizer)}
    state = packed["state"]
    if whole:  # copy the rest, too: otherwise it could be one step newer
        state = {
            number: _snapshot(own, whole[number]) if number in whole else copied(own)
            for number, own in state.items()
        }
    return {**packed, "state": state}


def _snapshot(entries: object, whole: Mapping[Any, Tensor]) -> object:
    """Return a parameter's state with `whole` in place of shards; all values are copies."""
    if not isinstance(entries, Mapping):
        return copied(entries)
    return {k: whole[k] if k in whole else filled(v, None) for k, v in entries.items()}


@PublicCall("optimizer.state_dict()")
@torch.inference_mode(False)  # later steps write to the result
def gather_state(optimizer: Optimizer, keep: bool = True) -> FullState:
    """Return the sharded parameters, each with the full tensors of its sharded state.

    keep: return the state; otherwise this rank only sends its shards, holds one full tensor at a
        time, and returns empty dicts.

    Collective over the ranks of the parameters' models, except over shm, where a rank reads the
    others' memory. Raises DivergenceError if their states differ in parameters, names, shapes or
    dtypes; RuntimeError for shards within a list or dict, or under a key that is no parameter.
    """
    if takes_full_state(optimizer):
        optimizer.full_state()  # type: ignore[attr-defined]
        return []
    other = facts_of_other(other_state(optimizer.state))
    full = _still_full(optimizer)
    if full is not None:
        return full if keep else [(param, {}) for param, _ in full]
    know(optimizer)
    held, layout = held_by(optimizer), layout_of(optimizer)
    result: FullState = []
    for model in dict.fromkeys(each.part.peers for each in held):
        mine = [each for each in held if each.part.peers is model]
        if model is not None and keep:
            result += read_full(optimizer, model, mine)
        elif model is not None:
            result += [(each.param, {}) for each in mine]
    for comm in {id(e.part.comm): e.part.comm for e in held if e.part.peers is None}.values():
        mine = [e for e in held if e.part.peers is None and e.part.comm is comm]
        check_agreement(comm, [*map(fact_of, mine), *other], "optimizers")
        for each, ranges in zip(mine, _ranges(comm, mine), strict=True):
            cut = [(key, value, own) for key, value, own in each.entries if own is not None]
            whole = {
                key: join(own, value, _of_groups(ranges, layout.get(key, 1)), keep)
                for key, value, own in cut
            }
            result.append((each.param, whole if keep else {}))
    return result


def _still_full(optimizer: Optimizer) -> FullState | None:
    """Return copies of state that is older than the sharded models and that no step has sharded
    yet: this rank has all of it, so it needs no other rank. None: some of it is sharded, or the
    ranks read it together, and shard it."""
    held = held_by(optimizer)
    if not is_older(optimizer) or any(each.part.peers is None for each in held):
        return None
    full = {(id(p), key) for key, own in full_state_of(optimizer).items() for p, _ in own}
    cut = {(id(e.param), key) for e in held for key, _, own in e.entries if own is not None}
    if not full or not cut <= full:
        return None
    post(optimizer)
    return [
        (e.param, {k: filled(v, None) for k, v, _ in e.entries if (id(e.param), k) in full})
        for e in held
    ]


def _ranges(comm: _core.Comm, held: Sequence[HeldState]) -> list[list[tuple[int, int]]]:
    """Return each parameter's (begin, numel) on all ranks. Raises RuntimeError on all of them if
    sharded tensors are within a list or dict."""
    mine = [(each.part.begin, each.part.numel, each.nested is not None) for each in held]
    found = []
    for each, rows in zip(held, zip(*gather(comm, mine), strict=True), strict=True):
        if all(nested for _, _, nested in rows):
            each.refuse_nested()
        found.append([(begin, numel) for begin, numel, _ in rows])
    return found


def _of_groups(ranges: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    return [(begin // size, -(-numel // size)) for begin, numel in ranges]


# --- loading --------------------------------------------------------------------------------------


@torch.inference_mode(False)
def _take_parts(optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any] | None:
    """Torch's pre-hook of load_state_dict(): return what this rank loads. Raises ValueError for
    state that does not match, before anything changes."""
    sizes = [len(group["params"]) for group in given["param_groups"]]
    if sizes != [len(group["params"]) for group in optimizer.param_groups]:
        return None  # raises torch's own error
    numbers = _numbers(optimizer, given)
    params = {numbers[id(param)]: param for param in params_of(optimizer)}
    rows = {number: given["state"].get(number) for number in params}
    found = {number: own for number, own in rows.items() if isinstance(own, Mapping)}
    problems = problems_with(optimizer, params, found)
    if problems:
        raise ValueError("\n".join(["the state dict does not match the optimizer:", *problems]))
    plan = OptimizerPlan(optimizer, params, found)
    rest = {key: copied(own) for key, own in given["state"].items() if key not in found}
    state = {**rest, **plan.take(None)}
    plan.read(None)
    return hidden(optimizer, {**given, "state": state})


def problems_with(
    optimizer: Optimizer,
    params: Mapping[Any, Tensor],
    state: Numbered,
    same_dtypes: bool = False,
) -> list[str]:
    """Return what is wrong with the state of each parameter: its tensors must be full or
    0-dimensional.

    same_dtypes: full ones must have the parameter's dtype, to which torch would silently cast them.
    """
    if takes_full_state(optimizer):  # which may have state of any shape
        return []
    wrong = problem_with_codes(optimizer, state)
    if wrong is not None:
        return [wrong]
    problems: list[str] = []
    wrong_dtypes: list[str] = []
    own_dtypes, layout = with_own_dtypes(optimizer), layout_of(optimizer)
    for number, entries in state.items():
        part = part_of(params[number])
        for key, value in entries.items():
            if part is None or not isinstance(value, Tensor):
                continue
            own = part_of_state(part, key, layout)
            shape, where = tuple(value.shape), f"'{key}' of parameter '{part.name}'"
            if is_traceable_wrapper_subclass(value):
                problems.append(
                    f"{where} is a {type(value).__name__}: pass a plain tensor (full_tensor())"
                )
            elif shape not in (own.shape, ()):
                problems.append(f"{where} has shape {shape}, expected {own.shape} or ()")
            keeps = id(params[number]) in own_dtypes or _keeps_dtype(value)
            if shape == own.shape != () and value.dtype != part.dtype and not keeps:
                wrong_dtypes.append(f"{where} has dtype {value.dtype}, expected {part.dtype}")
    return problems + wrong_dtypes if same_dtypes else problems


@dataclass(frozen=True)
class Taken:
    """Replaces a full tensor in a state dict: the part of it that this rank loads."""

    value: Any


def taken(optimizer: Optimizer, state: Numbered) -> Numbered:
    """Return the result of take() in a form that the optimizer's load_state_dict() accepts without
    looking for full tensors."""
    if not _has_parts(optimizer) or takes_full_state(optimizer):
        return state
    return {n: {key: Taken(value) for key, value in own.items()} for n, own in state.items()}


class _Entry(NamedTuple):
    """A value of a parameter's state."""

    number: Hashable
    param: Tensor
    key: Hashable
    full: Any
    part: Part | None  # this rank's shard of a full tensor; None: it loads the value as it is
    keeps_dtype: bool  # the optimizer has dtypes of its own, and may convert what it loads

    @property
    def own(self) -> Any:
        """Return the part that this rank loads."""
        return self.full if self.part is None else shard_of(self.part, self.full)

    @property
    def has_place(self) -> bool:
        """Return whether it is read into memory like the parameter's, with the same dtype."""
        keeps = self.keeps_dtype or _keeps_dtype(self.full)
        return self.part is not None and self.key != "step" and not keeps


class OptimizerPlan:
    """What loading `state` into parameters will do on this rank.

    The optimizer loads a full tensor as its parameter is sharded, so the parameter determines which
    elements this rank reads, and into what memory. The plan is made from shapes alone and changes
    nothing. take() then allocates the memory and reads what is small or has its own dtype; read()
    reads the shards into place, at once or after the optimizer has accepted the memory. The
    optimizer never gets a tensor of the given state, since later steps would write to it.
    """

    def __init__(self, optimizer: Optimizer, params: Mapping[Any, Tensor], state: Numbered) -> None:
        """params: all of the optimizer's, in its order. They are resharded, as between steps;
        Part.settle() documents what it raises. A WholeMatrix takes full tensors, and keeps what it
        needs."""
        whole, layout = takes_full_state(optimizer), layout_of(optimizer)
        for param in params.values():
            part = part_of(param)
            if part is not None:
                part.settle()
        found = [(n, p, part_of(p), state[n]) for n, p in params.items() if n in state]
        scalars = scalar_keys(
            (part.shape if part else tuple(p.shape), e) for _, p, part, e in found
        )

        def cut(part: Part | None, key: Hashable, value: object) -> Part | None:
            own = None if part is None or whole else part_of_state(part, key, layout)
            if own is None or not isinstance(value, Tensor) or value.shape != own.shape:
                return None
            return own if own.shape != () or key not in scalars else None

        keeps = with_own_dtypes(optimizer)
        self._entries = [
            _Entry(n, param, key, entries[key], cut(part, key, entries[key]), id(param) in keeps)
            for n, param, part, entries in found
            for key in entries
        ]
        self._numbers = [n for n, *_ in found]
        self._pieces: list[tuple[_Entry, Tensor]] = []
        """Shards and their places, which read() fills."""
        self._kept: list[tuple[_Entry, Tensor]] = []
        """Values in a dtype that the optimizer's load_state_dict() would cast."""

    def pending(self) -> list[Pending]:
        """Return the tensors that this rank will read."""
        return [each.own for each in self._entries if isinstance(each.full, Pending)]

    @plain()
    @torch.no_grad()
    def take(self, source: Source | None, live: Mapping[Any, Any] | None = None) -> Numbered:
        """Return the state to load. It has memory for shards, which read() fills.

        live: the optimizer's current state, to be overwritten where it fits.
        """
        places = self._places({} if live is None else live)
        state: dict[Any, dict[Any, Any]] = {number: {} for number in self._numbers}
        for at, entry in enumerate(self._entries):
            if at in places:
                value = places[at]
                self._pieces.append((entry, value))
            elif isinstance(entry.full, Taken):
                value = entry.full.value
            else:
                value = filled(entry.own, source)
            if _keeps_dtype(entry.full) and not entry.keeps_dtype:
                value = value.to(entry.param.device)
                self._kept.append((entry, value))
            state[entry.number][entry.key] = value
        return state

    def _places(self, live: Mapping[Any, Any]) -> dict[int, Tensor]:
        """Return memory for shards, by the entry's index: adjacent for each key, so that a step
        updates it as one run, or the existing memory if it suits all parameters."""
        members: dict[Any, list[int]] = {}
        for at, entry in enumerate(self._entries):
            if entry.has_place:
                members.setdefault(entry.key, []).append(at)
        found: dict[int, Tensor] = {}
        for key, own in members.items():
            params = [self._entries[at].param for at in own]
            places = [live.get(param, {}).get(key) for param in params]
            if not all(_is_place(p, param) for p, param in zip(places, params, strict=True)):
                places = zeros_side_by_side(params)
            found.update(zip(own, places, strict=True))
        return found

    def adopt(self, optimizer: Optimizer) -> None:
        """Make read() fill the tensors that the optimizer has made from the result of take().
        Raises RuntimeError if it has no place for a shard."""
        for entry, value in self._kept:
            if entry.key in optimizer.state[entry.param]:  # torch has cast it
                optimizer.state[entry.param][entry.key] = value
        for at, (entry, _) in enumerate(self._pieces):
            place = optimizer.state[entry.param].get(entry.key)
            if not _is_place(place, entry.param):
                raise RuntimeError(
                    f"zshard.load() cannot read '{entry.key}' in place: load_state_dict() of "
                    f"{type(optimizer).__name__} or one of its hooks replaced it"
                )
            self._pieces[at] = entry, place

    @plain()
    @torch.no_grad()
    def read(self, source: Source | None) -> None:
        """Read all shards."""
        for entry, place in self._pieces:
            Copy(place, entry.own).carry_out(source)


def _is_place(value: object, param: Tensor) -> bool:
    """Return whether this rank's shard of a state tensor can be read into `value`."""
    part = part_of(param)
    return (
        isinstance(value, Tensor)
        and part is not None
        and tuple(value.shape) == part.local_shape
        and value.dtype == param.dtype
        and value.device == param.device
        and not torch.is_inference(value)
    )


def _keeps_dtype(value: object) -> bool:
    return isinstance(value, Pending) and value.keeps_dtype
