"""state_dict() and load_state_dict() of optimizers over sharded parameters: full tensors.

The optimizer state of a sharded parameter is sharded like the parameter. Two torch
hooks convert between that and the state dict: one, after torch's packing and before any hook of the
user's, gathers the shards, a tensor at a time; the other, before torch's loading and after any hook
of the user's, takes this rank's shard of each full tensor. So the result is what the same optimizer
over the unsharded model would save, and it loads under any strategy, at any world size, and into
the unsharded model's optimizer.

Saving is collective; ranks agree first on what to gather. But over shm, the rank that saves asks
the others (state/lone_optimizer.py). Loading is not collective: each rank has all it needs.
What it does is planned in state/optimizer_plan.py.

Optimizers without parameters of a wrapped model are left to torch.
"""

from __future__ import annotations

import functools
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zshard import _core
from zshard.guard.whole_values import join
from zshard.optim.hooks import know, shard_earlier_state
from zshard.optim.sharded_state import HeldState, fact_of, held_by, params_of
from zshard.ranks.agreement import check_agreement, gather_bytes
from zshard.ranks.script_position import PublicCall
from zshard.state.lone_optimizer import WholeState, ask_for_whole
from zshard.state.optimizer_plan import OptimizerPlan, has_parts, problems_with
from zshard.state.source import filled
from zshard.units.shards import part_of, units_stepped_by
from zshard.units.units import writing

__all__ = ["gather", "install"]

_torchs_save = Optimizer.state_dict
_torchs_load = Optimizer.load_state_dict


def install() -> None:
    """Make torch's optimizers save and load full tensors. Idempotent."""
    Optimizer.state_dict = _save  # type: ignore[method-assign]
    Optimizer.load_state_dict = _load  # type: ignore[method-assign]


@functools.wraps(_torchs_save)
def _save(self: Optimizer) -> dict[str, Any]:
    if not has_parts(self):
        return _torchs_save(self)
    shard_earlier_state(self)
    handle = self.register_state_dict_post_hook(_make_whole, prepend=True)
    try:
        return _torchs_save(self)
    finally:
        handle.remove()


@functools.wraps(_torchs_load)
def _load(self: Optimizer, state_dict: dict[str, Any]) -> None:
    if not has_parts(self):
        _torchs_load(self, state_dict)
        return
    handle = self.register_load_state_dict_pre_hook(_take_parts)
    try:
        with writing(units_stepped_by(self)):  # a rank that asks gets all of it, or nothing
            _torchs_load(self, _with_names(state_dict))
            know(self)
    finally:
        handle.remove()


# --- saving ---------------------------------------------------------------------------------------


def _make_whole(optimizer: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
    """Torch's post-hook of state_dict(). See gather() for which ranks call it."""
    numbers = _numbers(optimizer, packed["param_groups"])
    whole = {numbers[id(param)]: entries for param, entries in gather(optimizer)}
    state = packed["state"]
    if whole:  # copies of the rest, too: else it would be of the next step when this is of the last
        state = {number: _snapshot(e, whole.get(number, {})) for number, e in state.items()}
    made = OrderedDict(packed, state=state)
    made._param_names = _names_of(optimizer)  # type: ignore[attr-defined]
    return made


def _snapshot(entries: Any, whole: Mapping[Any, Tensor]) -> Any:
    """A parameter's state with what is `whole` in place of slices; nothing is the optimizer's."""
    if not isinstance(entries, Mapping):
        return entries
    return {k: whole[k] if k in whole else filled(v, None) for k, v in entries.items()}


def _numbers(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> dict[int, Any]:
    """What a state dict's groups call each parameter, by the parameter's id."""
    listed = (number for group in groups for number in group["params"])
    return {id(p): number for p, number in zip(params_of(optimizer), listed, strict=True)}


@PublicCall("optimizer.state_dict()")
@torch.inference_mode(False)  # what is made is to be written to later
def gather(optimizer: Optimizer, keep: bool = True) -> list[tuple[Tensor, dict[Any, Tensor]]]:
    """Return the sharded parameters, each with the full tensors of its sharded state.

    keep: return the state; else this rank only sends its shards, holds one full tensor at a time,
        and returns empty dicts.

    Collective over the ranks of the parameters' models, but over shm, where a rank asks the others.
    Raises DivergenceError if their states differ in parameters, names, shapes or dtypes;
    RuntimeError for shards within a list or dict.
    """
    everything = held_by(optimizer)
    asked = _ask_peers(optimizer, everything, keep)
    held = [each for each in everything if each.part.peers is None]
    holders: dict[int, list[tuple[int, int]]] = {}
    for comm in {id(each.part.comm): each.part.comm for each in held}.values():
        mine = [each for each in held if each.part.comm is comm]
        check_agreement(comm, [fact_of(each) for each in mine], "optimizers")
        for each, ranges in zip(mine, _ranges(comm, mine), strict=True):
            holders[id(each)] = ranges
    result = []
    for each in held:
        cut = [(key, value) for key, value, is_cut in each.entries if is_cut]
        whole = {key: join(each.part, value, holders[id(each)], keep) for key, value in cut}
        result.append((each.param, whole if keep else {}))
    return asked + result


def _ask_peers(optimizer: Optimizer, held: Sequence[HeldState], keep: bool) -> WholeState:
    """The state of models whose ranks can be asked for it, one by one."""
    found: WholeState = []
    models = {id(each.part.peers): each.part.peers for each in held if each.part.peers}
    for peers in models.values():
        mine = [each for each in held if each.part.peers is peers]
        if keep:
            found += ask_for_whole(optimizer, peers, mine)
        else:
            found += [(each.param, {}) for each in mine]
    return found


def _ranges(comm: _core.Comm, held: Sequence[HeldState]) -> list[list[tuple[int, int]]]:
    """Return each parameter's (begin, numel) on all ranks. Raises RuntimeError on all of them if
    sharded tensors are within a list or dict; a rank alone could be misled by a shape."""
    told = [(each.part.begin, each.part.numel, int(each.nested is not None)) for each in held]
    mine = array("q", [number for row in told for number in row])
    everyone = [array("q", data) for data in gather_bytes(comm, mine.tobytes())]
    found = []
    for i, each in enumerate(held):
        rows = [them[3 * i : 3 * i + 3] for them in everyone]
        if all(row[2] for row in rows):
            raise RuntimeError(
                f"{each.nested} in the optimizer's state of '{each.part.name}' contains sharded "
                "tensors, which state_dict() cannot gather: store each tensor directly under its "
                "own key"
            )
        found.append([(row[0], row[1]) for row in rows])
    return found


# --- loading --------------------------------------------------------------------------------------


@torch.inference_mode(False)
def _take_parts(optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any] | None:
    """Torch's pre-hook of load_state_dict(): return what this rank loads. Raises ValueError for
    state that does not match, before anything changes."""
    sizes = [len(group["params"]) for group in given["param_groups"]]
    if sizes != [len(group["params"]) for group in optimizer.param_groups]:
        return None  # torch's own error
    groups = _in_our_order(optimizer, given["param_groups"])
    numbers = _numbers(optimizer, groups)
    params = {numbers[id(param)]: param for param in params_of(optimizer)}
    rows = {number: given["state"].get(number) for number in params}
    found = {number: own for number, own in rows.items() if isinstance(own, Mapping)}
    problems = problems_with(params, found)
    if problems:
        raise ValueError("\n".join(["the state dict does not match the optimizer:", *problems]))
    plan = OptimizerPlan(params, found)
    state = {**given["state"], **plan.take(None)}
    plan.read(None)
    return {**given, "state": state, "param_groups": groups}


# --- names ----------------------------------------------------------------------------------------
#
# A state dict has the keys of torch's: torch.distributed.checkpoint refuses files that lack a key.
# So names of parameters that torch's optimizer does not know are an attribute, which pickling and
# copying keep; without it, a parameter's number is its place, as in torch.


def _with_names(given: dict[str, Any]) -> dict[str, Any]:
    """A state dict with the names of its attribute in its groups, where torch puts them."""
    names, groups = getattr(given, "_param_names", None), given.get("param_groups", ())
    if names is None or [len(own) for own in names] != [len(g["params"]) for g in groups]:
        return given
    pairs = zip(groups, names, strict=True)
    return {**given, "param_groups": [{"param_names": own, **group} for group, own in pairs]}


def _names_of(optimizer: Optimizer) -> list[list[str]] | None:
    """The names of each group's parameters: the user's, or those they have in their model. None
    where one has none, or two have the same."""
    names = [_own_names(group) for group in optimizer.param_groups]
    flat = [name for own in names for name in own]
    if None in flat or len(set(flat)) < len(flat):
        return None
    return names  # type: ignore[return-value]


def _own_names(group: Mapping[str, Any]) -> list[str | None]:
    if "param_names" in group:
        return list(group["param_names"])
    parts = [part_of(param) for param in group["params"]]
    return [part.name if part else None for part in parts]


def _in_our_order(optimizer: Optimizer, given: Sequence[Any]) -> list[dict[str, Any]]:
    """The groups of a state dict with their parameters in the order of ours, where names tell."""
    ours, theirs = _names_of(optimizer), _given_names(given)
    groups = [dict(group) for group in given]
    if ours is not None and theirs is not None:
        _match(groups, ours, theirs)
    for group, own in zip(groups, optimizer.param_groups, strict=True):
        group.pop("param_names", None)  # of another order, or a surprise to add_param_group()
        if "param_names" in own:
            group["param_names"] = list(own["param_names"])
    return groups


def _given_names(given: Sequence[Any]) -> list[list[str]] | None:
    """What a state dict calls its parameters; None where it has numbers only."""
    for names in ([g["params"] for g in given], [g.get("param_names") or [] for g in given]):
        flat = [name for own in names for name in own]
        is_known = all(isinstance(name, str) for name in flat) and len(set(flat)) == len(flat)
        sizes = [len(own) for own in names]
        if is_known and sizes == [len(group["params"]) for group in given]:
            return names
    return None


def _match(groups: list[dict[str, Any]], ours: list[list[str]], theirs: list[list[str]]) -> None:
    """Put the groups' numbers in the order of our names, if theirs are the same names. Raises
    ValueError if a parameter is in another group."""
    if {name for own in ours for name in own} != {name for own in theirs for name in own}:
        return
    for i, (group, own, other) in enumerate(zip(groups, ours, theirs, strict=True)):
        strangers = sorted(set(other) - set(own))
        if strangers:
            raise ValueError(
                f"param group {i} of the state dict has parameter '{strangers[0]}', which is in "
                "another param group of the optimizer: construct the optimizer with the same "
                "param groups"
            )
        number_of = dict(zip(other, group["params"], strict=True))
        group["params"] = [number_of[name] for name in own]
