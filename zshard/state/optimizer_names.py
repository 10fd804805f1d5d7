"""Optimizer state by parameter name.

optimizer.state_dict() is already full (state/optimizer.py); this file converts between numbers and
names. It also controls which rank has the state: with `rank0_only` other ranks only send their
shards, and with `from_rank0` they receive theirs.

    {"state": {name: {"step": ..., "exp_avg": ...}}, "param_groups": [{"params": [name], ...}]}

State that an optimizer keeps under a key that is no parameter stays under that key.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zshard import _core
from zshard.optim.sharded_state import params_of, without_parameters
from zshard.ranks.agreement import PublicCall, gather, on_all_ranks
from zshard.ranks.transports import comm_for
from zshard.state.optimizer import gather_state
from zshard.state.optimizer_load import (
    ReadState,
    entries_to_load,
    problems_with,
    read_entries,
    undo_of,
)
from zshard.state.source import FromRank0, pending
from zshard.state.stand_ins import Pending
from zshard.units.returned import note_used, tensors_in
from zshard.units.shards import part_of
from zshard.units.units import plain_name, units_of


@PublicCall("optim_state_dict()")
def optim_state_dict(
    model: nn.Module, optimizer: Optimizer, *, rank0_only: bool = False
) -> dict[str, Any]:
    """Return the optimizer's full state, keyed by parameter name, as tensors on the CPU.

    Over shm, any rank may call it alone; over c10d and on GPUs it is collective.

    Args:
        model: the sharded model, or a module that contains it. A tied parameter has the first name
            in model.named_parameters(). Prefixes of torch.compile() and activation checkpointing
            are removed from names.
        optimizer: an optimizer of the model's parameters.
        rank0_only: return {} on ranks other than 0, which then hold at most one full tensor.

    Returns {"state": {name: {key: tensor or value}}, "param_groups": [{"params": [name, ...],
    option: value}]}, the format of FSDP1 and torch.distributed.checkpoint.state_dict. Tensors are
    copies, with the shapes and dtypes of the unsharded model's optimizer state. State under a key
    that is no parameter stays under it.

    Raises ValueError if the optimizer has a parameter that the model lacks, or such a key is a
    parameter's name; DivergenceError on all ranks if their states differ in parameters, keys,
    shapes or dtypes.
    """
    names = names_of(model, optimizer)
    if rank0_only and outermost_comm(model).rank != 0:
        gather_state(optimizer, keep=False)
        return {}
    return by_name(names, optimizer, optimizer.state_dict())


@PublicCall("load_optim_state_dict()")
def load_optim_state_dict(
    model: nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, Any] | None,
    *,
    from_rank0: bool = False,
) -> None:
    """Load the result of optim_state_dict(), under any strategy and world size.

    Collective.

    Args:
        model: the sharded model, or a module that contains it.
        optimizer: the optimizer to load into.
        state: as returned by optim_state_dict(): full tensors of the parameters' shapes and dtypes.
            A tied parameter may have any of its names. Parameters without an entry lose their
            state.
        from_rank0: only rank 0 has `state`; the others pass None or {}. Rank 0 sends the values in
            chunks of 16 MiB; each rank keeps its shards.

    Raises ValueError on all ranks, before anything changes, that lists unknown, missing or
    misplaced parameters, and wrong shapes and dtypes of sharded ones.
    """
    numbered = to_load(model, optimizer, state, from_rank0)
    undo = undo_of(optimizer)
    try:
        with on_all_ranks(outermost_comm(model)):
            optimizer.load_state_dict(numbered)
    except BaseException:
        undo()
        raise


def outermost_comm(model: nn.Module) -> _core.Comm:
    """Return the ranks of the outermost unit; a single rank for a model without units."""
    state = next((state for _, state in units_of(model)), None)
    return state.comms.all if state is not None else comm_for(None, None, None)


def names_of(model: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    """Return the first name in the model of each of the optimizer's parameters, by id. Raises
    ValueError for a parameter that the model lacks."""
    names = {id(param): plain_name(name) for name, param in model.named_parameters()}
    for i, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                part = part_of(param)
                what = (
                    f"parameter '{part.name}'"
                    if part
                    else f"a parameter of shape {tuple(param.shape)}"
                )
                raise ValueError(
                    f"param group {i} of the optimizer has {what}, which the model "
                    "lacks: pass the model that the optimizer was created for"
                )
    return names


def refuse_clash(other: Iterable[Any], names: Mapping[int, str]) -> None:
    """Raise ValueError for state under a key that is no parameter, but a parameter's name."""
    clash = next((key for key in other if key in names.values()), None)
    if clash is not None:
        raise ValueError(
            f"the optimizer has state under {clash!r}, which is also a parameter's name: use "
            "optimizer.state_dict(), or another key"
        )


def by_name(
    names: Mapping[int, str], optimizer: Optimizer, numbered: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a copy of a state dict of torch's format with names instead of numbers."""
    note_used(tensors_in(numbered["state"]))  # these are no aliases under DDP either
    numbers = {number for group in numbered["param_groups"] for number in group["params"]}
    state: dict[Any, Any] = {
        key: _copy(value, optimizer.state.get(key))
        for key, value in numbered["state"].items()
        if key not in numbers
    }
    refuse_clash(state, names)
    groups: list[dict[str, Any]] = []
    for ours, given in zip(optimizer.param_groups, numbered["param_groups"], strict=True):
        own = [names[id(param)] for param in ours["params"]]
        groups.append({**_options_of(given), "params": own})
        for param, number in zip(ours["params"], given["params"], strict=True):
            if number in numbered["state"]:
                live = optimizer.state.get(param, {})
                entries = numbered["state"][number]
                state[names[id(param)]] = {k: _copy(v, live.get(k)) for k, v in entries.items()}
    return {"state": state, "param_groups": groups}


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a group without its parameters."""
    options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    return copy.deepcopy(options)


def _copy(value: object, live: object) -> Any:
    """Return a value on the CPU; a copy if the optimizer owns it."""
    if isinstance(value, Tensor):
        return value.detach().clone().cpu() if value is live else value.detach().cpu()
    return copy.deepcopy(value)


def to_load(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any] | None, from_rank0: bool
) -> dict[str, Any]:
    """Return optimizer.load_state_dict()'s argument. Raises ValueError, the same on all ranks."""
    names_of(model, optimizer)
    comm = outermost_comm(model)
    problems: list[str] = []
    made: dict[str, Any] = {}
    with on_all_ranks(comm):
        if comm.rank == 0 or not from_rank0:
            problems, made = by_number(model, optimizer, state)
    _raise_together(comm, problems)
    return _from_rank0(comm, optimizer, made) if from_rank0 and comm.world > 1 else made


@torch.inference_mode(False)
def _from_rank0(comm: _core.Comm, optimizer: Optimizer, made: dict[str, Any]) -> dict[str, Any]:
    """Return rank 0's state dict by number, with this rank's shards already cut out."""
    # Numbers travel together: one message each would take longer.
    source = FromRank0(comm)
    outline = {
        n: pending(own, source, dims=1) if type(n) is int else own
        for n, own in made.get("state", {}).items()
    }
    told = source.outline({**made, "state": outline})
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in told["param_groups"]]
    if sizes == theirs:
        problems = problems_with(optimizer, told)
    else:
        problems = [f"its param groups have {theirs} parameters, but this rank's have {sizes}"]
    _raise_together(comm, problems)
    state = {n: dict(own) for n, own in told["state"].items() if type(n) is int}
    with on_all_ranks(comm):
        entries = [e for e in entries_to_load(optimizer, told) if isinstance(e.full, Pending)]
    for each, value in read_entries(optimizer, entries):
        whole = tuple(each.full.shape)  # which hooks see
        shown = value if each.part is None else ReadState.of(str(each.key), value, source, whole)
        state[each.param.number][each.key] = shown
    return {**told, "state": {**told["state"], **state}}


def _raise_together(comm: _core.Comm, problems: Sequence[str]) -> None:
    text = "\n".join(problems)
    everyone = gather(comm, text)
    for rank, each in enumerate(everyone):
        if each:
            where = "" if len(set(everyone)) == 1 else f" on rank {rank}"
            raise ValueError(f"the state dict does not match the optimizer{where}:\n{each}")


def by_number(
    model: nn.Module, optimizer: Optimizer, given: Mapping[str, Any] | None
) -> tuple[list[str], dict[str, Any]]:
    """Return the problems with a dict by name, and the same dict by number if there are none."""
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
        how = "pass the result of zshard.optim_state_dict(model, optimizer)"
        return [f"it lacks 'state' or 'param_groups': {how}"], {}
    ours, theirs = optimizer.param_groups, given["param_groups"]
    listed = [[_plain(name) for name in group.get("params", ())] for group in theirs]
    if len(ours) != len(theirs):
        return [f"it has {len(theirs)} param groups, but the optimizer has {len(ours)}"], {}
    params = dict(enumerate(params_of(optimizer)))
    numbers = {id(param): number for number, param in params.items()}
    named = model.named_parameters(remove_duplicate=False)
    known = {plain_name(name): param for name, param in named if id(param) in numbers}
    of_groups = set(itertools.chain(*listed))
    rest = {n: own for n, own in given["state"].items() if _plain(n) not in {*known, *of_groups}}
    other = without_parameters(rest, [own for n, own in given["state"].items() if n not in rest])
    states = {_plain(name): own for name, own in given["state"].items() if name not in other}
    problems = _unknown(dict.fromkeys(itertools.chain(states, *listed)), known)
    for i, (own, names) in enumerate(zip(ours, listed, strict=True)):
        problems += _misplaced(i, own["params"], names, known)
    states = {name: entries for name, entries in states.items() if name in known}
    wrong = [name for name, entries in states.items() if not isinstance(entries, Mapping)]
    problems += [f"the state of {name!r} is not a dict" for name in wrong]
    found = [(numbers[id(known[n])], own) for n, own in states.items() if n not in wrong]
    state = dict(found)
    if len(state) < len(found):
        problems.append("it has state for a tied parameter twice, under two of its names")
    groups = [
        {**_options_of(other), "params": [numbers[id(p)] for p in own["params"]]}
        for own, other in zip(ours, theirs, strict=True)
    ]
    numbered = {"state": {**state, **other}, "param_groups": groups}
    return problems + problems_with(optimizer, numbered, same_dtypes=True), numbered


def _plain(name: object) -> Any:
    """Return a name without the prefixes of wrappers; a number unchanged."""
    return plain_name(name) if isinstance(name, str) else name


def _unknown(names: Iterable[Any], known: Mapping[str, Tensor]) -> list[str]:
    """Return the names that match no parameter of the optimizer."""
    strangers = [name for name in names if name not in known]
    if strangers and all(isinstance(name, int) for name in strangers):
        return ["its parameters are numbered, not named: use optimizer.load_state_dict()"]
    return [f"the optimizer has no parameter {name!r}" for name in strangers]


def _misplaced(
    i: int, own: Sequence[Tensor], names: Sequence[Any], known: Mapping[str, Tensor]
) -> list[str]:
    """Return the parameters that are in group `i` of only the optimizer or only the state dict."""
    first = {id(param): name for name, param in reversed(list(known.items()))}
    here = {first[id(p)] for p in own}
    there = {first[id(known[name])] for name in names if name in known}
    return [f"its param group {i} lacks parameter '{name}'" for name in sorted(here - there)] + [
        f"param group {i} of the optimizer lacks parameter '{name}'"
        for name in sorted(there - here)
    ]
