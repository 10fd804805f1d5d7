"""The state of an optimizer by the names of a model's parameters: FSDP1's optim_state_dict.

The one idea: optimizer.state_dict() is whole already (_optim_state.py); here numbers become names
and names numbers. What is added is who holds it: with `rank0_only` other ranks only give their
parts, and with `from_rank0` they get theirs out of one whole tensor at a time.

    {"state": {name: {"step": ..., "exp_avg": ...}}, "param_groups": [{"params": [name], ...}]}
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zshard import _core
from zshard._agree import gather_bytes
from zshard._group import comm_for
from zshard._optim_state import Room, Taken, gather, problems_with, settle
from zshard._parts import part_of
from zshard._plain_names import plain
from zshard._units import State, units_of
from zshard._values import take_from_rank_0

__all__ = [
    "OptimStateMethods",
    "by_number",
    "load_optim_state_dict",
    "names_of",
    "optim_state_dict",
]

_HOW = "zshard.optim_state_dict(model, optimizer)"


def optim_state_dict(
    model: nn.Module, optimizer: Optimizer, *, rank0_only: bool = False
) -> dict[str, Any]:
    """The optimizer's state under the names of the model's parameters: whole tensors on the CPU.

    model: the sharded model, or one that has it as a part. A tied parameter goes by the first name
        that model.named_parameters() gives. What torch.compile() and activation checkpointing add
        to names is left out.
    rank0_only: the other ranks get {}, and never hold more than one whole tensor.

    Returns {"state": {name: {key: tensor or value}}, "param_groups": [{"params": [name, ...],
    option: value}]}, which FSDP1 and torch.distributed.checkpoint.state_dict have as well; tensors
    have the shape and dtype that the plain model's optimizer gives them, and are copies. For all
    ranks together. Raises ValueError for a parameter that the model does not have, DivergenceError
    on all ranks where their states are of different parameters, keys, shapes or dtypes.
    """
    names = names_of(model, optimizer)
    if rank0_only and _comm_of(model).rank != 0:
        gather(optimizer, keep=False)
        return {}
    return _by_name(names, optimizer, optimizer.state_dict())


def load_optim_state_dict(
    model: nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, Any] | None,
    *,
    from_rank0: bool = False,
) -> None:
    """Loads what optim_state_dict() gave, at whatever strategy and number of ranks.

    state: as optim_state_dict() returns it; whole tensors of the parameters' shapes and dtypes. A
        tied parameter may go by any of its names; one without state has none afterwards.
    from_rank0: rank 0 alone has it, and the others pass None or {}. They get it a tensor at a time
        and never hold more than one whole tensor.

    For all ranks together. Raises ValueError on all ranks, before anything has changed, naming
    parameters that are unknown, missing or in another group, and shapes and dtypes that are wrong.
    """
    optimizer.load_state_dict(_to_load(model, optimizer, state, from_rank0))


class OptimStateMethods:
    """FSDP1's spellings of both, as static methods of FSDP."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: Mapping[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """zshard.optim_state_dict(); within state_dict_type, as its optim_state_dict_config says.

        optim_state_dict: what optim.state_dict() gave, if there is that already.
        group: the process group of the model's ranks; these take part in any case.
        """
        _check_group(model, group)
        rank0_only = _rank0_only(model)
        if optim_state_dict is None:
            return _optim_state_dict(model, optim, rank0_only=rank0_only)
        if rank0_only and _comm_of(model).rank != 0:
            return {}
        return _by_name(names_of(model, optim), optim, optim_state_dict)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: Mapping[str, Any] | None,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """Makes optim_state_dict()'s result what optim.load_state_dict() takes; see
        zshard.load_optim_state_dict() for what is wrong with one. For all ranks together.

        load_directly: load it as well. is_named_optimizer: True is a NotImplementedError.
        Within state_dict_type with `rank0_only`, rank 0 alone has the dict, and what is returned is
        for `optim` on this rank only.
        """
        if is_named_optimizer:
            raise NotImplementedError(
                "is_named_optimizer=True is for torch's _NamedOptimizer, which zshard does not know"
            )
        _check_group(model, group)
        made = _to_load(model, optim, optim_state_dict, _rank0_only(model))
        if load_directly:
            optim.load_state_dict(made)
        return made

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """zshard.optim_state_dict(), by default for rank 0 only. optim_input: leave it out."""
        if optim_input is not None:
            raise NotImplementedError("full_optim_state_dict: optim_input is not needed; leave out")
        _check_group(model, group)
        return _optim_state_dict(model, optim, rank0_only=rank0_only)


_optim_state_dict = optim_state_dict  # which within the class is another


# --- the model ------------------------------------------------------------------------------------


def _first_state(model: nn.Module) -> State | None:
    return next((state for _, state in units_of(model)), None)


def _comm_of(model: nn.Module) -> _core.Comm:
    """The ranks of the outermost unit; a world of one for a model without units."""
    state = _first_state(model)
    return state.comms.all if state is not None else comm_for(None, None, None)


def _rank0_only(model: nn.Module) -> bool:
    state = _first_state(model)
    return state is not None and state.optim_rank0_only


def _check_group(model: nn.Module, group: Any) -> None:
    world = _comm_of(model).world
    if group is not None and dist.get_world_size(group) != world:
        raise ValueError(
            f"group has {dist.get_world_size(group)} ranks and the model {world}; the model's own "
            "ranks take part: leave group out"
        )


def names_of(model: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    """The name of each parameter of the optimizer, by its id: the first that the model gives it.
    ValueError for a parameter that the model does not have."""
    names = {id(param): plain(name) for name, param in model.named_parameters()}
    for i, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                part = part_of(param)
                what = f"'{part.name}'" if part else f"of shape {tuple(param.shape)}"
                raise ValueError(
                    f"group {i} of the optimizer has a parameter {what} that the model has not: "
                    "give the model that the optimizer was made for, or a module that has all its "
                    "parameters"
                )
    return names


def _by_name(
    names: Mapping[int, str], optimizer: Optimizer, numbered: Mapping[str, Any]
) -> dict[str, Any]:
    """A state dict of torch's form with names for numbers; nothing in it is the optimizer's own."""
    state: dict[Any, Any] = {}
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
    """A copy of a group without its parameters."""
    options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    return copy.deepcopy(options)


def _copy(value: Any, live: Any) -> Any:
    """A value on the CPU; of what the optimizer has itself, a copy."""
    if isinstance(value, Tensor):
        return value.detach().clone().cpu() if value is live else value.detach().cpu()
    return copy.deepcopy(value)


# --- loading --------------------------------------------------------------------------------------


def _to_load(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any] | None, from_rank0: bool
) -> dict[str, Any]:
    """What optimizer.load_state_dict() takes, numbers for names. ValueError on all ranks alike."""
    names_of(model, optimizer)
    comm = _comm_of(model)
    given = state if comm.rank == 0 or not from_rank0 else None
    problems: list[str] = []
    made: dict[str, Any] = {}
    if given is not None or not from_rank0:
        problems, made = by_number(model, optimizer, given)
    _raise_together(comm, problems)
    if from_rank0 and comm.world > 1:
        return _from_rank0(comm, optimizer, made)
    return made


def _raise_together(comm: _core.Comm, problems: Sequence[str]) -> None:
    """ValueError on all ranks if there are problems on any."""
    text = "\n".join(problems)
    everyone = [each.decode() for each in gather_bytes(comm, text.encode())]
    for rank, each in enumerate(everyone):
        if each:
            where = "" if len(set(everyone)) == 1 else f" on rank {rank}"
            raise ValueError(f"the optimizer's state does not fit{where}:\n{each}")


def by_number(
    model: nn.Module, optimizer: Optimizer, given: Mapping[str, Any] | None
) -> tuple[list[str], dict[str, Any]]:
    """What is wrong with a dict by name; and, if nothing is, the same by number."""
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
        return [f"it has no 'state' and 'param_groups'; give what {_HOW} returns"], {}
    given = _with_plain_names(given)
    params = {plain(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    ours, theirs = optimizer.param_groups, given["param_groups"]
    if len(ours) != len(theirs):
        return [f"it has {len(theirs)} param groups, the optimizer {len(ours)}"], {}
    listed = {id(p) for group in ours for p in group["params"]}
    known = {name: param for name, param in params.items() if id(param) in listed}
    problems = _unknown(given, known)
    for i, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        problems += _misplaced(i, own["params"], [known.get(n) for n in _listed(other)], known)
    states = {name: entries for name, entries in given["state"].items() if name in known}
    problems += [f"its state of {n!r} is no dict" for n, e in states.items() if not _is_dict(e)]
    found = [(known[name], entries) for name, entries in states.items() if _is_dict(entries)]
    if len({id(param) for param, _ in found}) < len(found):
        problems.append("it has the state of a tied parameter twice, under two of its names")
    problems += problems_with(found) + _wrong_types(found)
    numbers = {id(p): i for i, p in enumerate(p for group in ours for p in group["params"])}
    groups = [
        {**_options_of(other), "params": [numbers[id(p)] for p in own["params"]]}
        for own, other in zip(ours, theirs, strict=True)
    ]
    return problems, {
        "state": {numbers[id(param)]: entries for param, entries in found},
        "param_groups": groups,
    }


def _with_plain_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """A dict by name with names that no wrapper has a part in."""

    def of(name: Any) -> Any:
        return plain(name) if isinstance(name, str) else name

    groups = [
        {**group, "params": [of(n) for n in _listed(group)]} for group in given["param_groups"]
    ]
    state = {of(name): entries for name, entries in given["state"].items()}
    return {**given, "state": state, "param_groups": groups}


def _is_dict(value: Any) -> bool:
    return isinstance(value, Mapping)


def _listed(group: Mapping[str, Any]) -> list[Any]:
    return list(group.get("params", ()))


def _unknown(given: Mapping[str, Any], known: Mapping[str, Tensor]) -> list[str]:
    """Names that no parameter of the optimizer has."""
    names = dict.fromkeys(given["state"])
    names.update(dict.fromkeys(n for group in given["param_groups"] for n in _listed(group)))
    strangers = [name for name in names if name not in known]
    if strangers and all(isinstance(name, int) for name in strangers):
        return ["it has numbers for parameters; load it by optimizer.load_state_dict()"]
    return [f"the optimizer has no parameter {name!r}" for name in strangers]


def _misplaced(
    i: int, own: Sequence[Tensor], other: Sequence[Tensor | None], known: Mapping[str, Tensor]
) -> list[str]:
    """Parameters that group `i` has here and not in the state dict, or the other way round."""
    first = {id(param): name for name, param in reversed(list(known.items()))}
    here = {first[id(p)] for p in own}
    there = {first[id(p)] for p in other if p is not None}
    return [f"group {i} of it has no parameter '{name}'" for name in sorted(here - there)] + [
        f"group {i} of the optimizer has no parameter '{name}'" for name in sorted(there - here)
    ]


def _wrong_types(found: Iterable[tuple[Tensor, Mapping[Any, Any]]]) -> list[str]:
    """State of a parameter's shape that is not of its dtype: torch would convert it in silence."""
    problems = []
    for param, entries in found:
        part = part_of(param)
        for key, value in entries.items() if part is not None else ():
            if part is None or not isinstance(value, Tensor) or value.dim() == 0:
                continue
            if value.shape == part.shape and value.dtype != part.dtype:
                problems.append(
                    f"'{key}' of parameter '{part.name}' is of {value.dtype}, the parameter of "
                    f"{part.dtype}"
                )
    return problems


# --- from rank 0, a tensor at a time --------------------------------------------------------------


@torch.inference_mode(False)
def _from_rank0(comm: _core.Comm, optimizer: Optimizer, numbered: dict[str, Any]) -> dict[str, Any]:
    """The state dict that rank 0 has, with this rank's parts in place of whole tensors."""
    mine = pickle.dumps(_outline(numbered)) if comm.rank == 0 else b""
    outline: dict[str, Any] = pickle.loads(gather_bytes(comm, mine)[0])
    params = [param for group in optimizer.param_groups for param in group["params"]]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in outline["param_groups"]]
    found = [(params[i], entries) for i, entries in outline["state"].items() if i < len(params)]
    problems = problems_with(found) if comm.rank != 0 else []
    if sizes != theirs:
        problems = [f"its groups have {theirs} parameters, this rank's optimizer {sizes}"]
    _raise_together(comm, problems)
    settle(optimizer)
    room, state = Room(found), {}
    for number, entries in outline["state"].items():
        values = numbered["state"][number] if comm.rank == 0 else entries
        state[number] = {
            key: _received(comm, room, (params[number], key), values[key]) for key in entries
        }
    return {**outline, "state": state}


def _outline(numbered: Mapping[str, Any]) -> dict[str, Any]:
    """The dict without the values of tensors that have dimensions."""
    state = {
        number: {
            key: value.to("meta") if isinstance(value, Tensor) and value.dim() > 0 else value
            for key, value in entries.items()
        }
        for number, entries in numbered["state"].items()
    }
    return {"state": state, "param_groups": numbered["param_groups"]}


def _received(comm: _core.Comm, room: Room, place: tuple[Tensor, Any], value: Any) -> Any:
    """What this rank loads in a `place`, (parameter, key), of rank 0's value; elsewhere, `value` is
    its outline."""
    if isinstance(value, Tensor) and value.dim() > 0:
        value = torch.empty_like(value, device="cpu") if value.is_meta else value.detach().cpu()
        take_from_rank_0(comm, value)
    return Taken(room.take(*place, value)) if room.is_cut(*place, value) else value
