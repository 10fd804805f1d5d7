"""The methods of FSDP1's modules: state dict types, optimizer state, and questions about units.

The one idea: optimizer state is full, by parameter name, and loads under any strategy. FSDP1's
older functions come down to that form and to two steps: numbers become names, and names numbers.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from zshard._compat.fsdp1 import summon_full_params
from zshard._compat.state_dict_types import (
    get_state_dict_type,
    set_state_dict_type,
    state_dict_type,
)
from zshard._state_dict.optimizer_names import (
    by_name,
    names_of,
    outermost_comm,
    to_load,
)
from zshard._state_dict.optimizer_names import optim_state_dict as _optim_state_dict
from zshard._units.names import plain_name
from zshard._units.units import State, state_of, units_of


class Fsdp1Methods(nn.Module):
    """The methods of FSDP1's modules."""

    summon_full_params = summon_full_params
    state_dict_type = staticmethod(state_dict_type)
    set_state_dict_type = staticmethod(set_state_dict_type)
    get_state_dict_type = staticmethod(get_state_dict_type)

    def check_is_root(self) -> bool:
        """Return whether this is the outermost unit of its model."""
        return not state_of(self).unit.name

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: Mapping[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """Return the optimizer's full state by parameter name; see zshard.optim_state_dict().

        Within FSDP.state_dict_type, its optim_state_dict_config applies. Over shm, any rank may
        call it alone; over c10d and on GPUs it is collective.

        Args:
            optim_state_dict: the result of optim.state_dict(), if you have it already.
            group: accepted for compatibility: a process group of the same size as the model's.
        """
        _check_group(model, group)
        rank0_only = _rank0_only(model)
        if optim_state_dict is None:
            return _optim_state_dict(model, optim, rank0_only=rank0_only)
        if rank0_only and outermost_comm(model).rank != 0:
            return {}
        return by_name(names_of(model, optim), optim, optim_state_dict)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: Mapping[str, Any] | None,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """Convert the result of optim_state_dict() into what optim.load_state_dict() takes.

        Collective.

        Args:
            optim_state_dict: the dict; within FSDP.state_dict_type with `rank0_only` only rank 0
                has it, and the result is valid for `optim` on this rank only.
            is_named_optimizer: True raises NotImplementedError.
            load_directly: also load it into `optim`.
            group: accepted for compatibility: a process group of the same size as the model's.

        Raises ValueError as zshard.load_optim_state_dict() does.
        """
        if is_named_optimizer:
            raise NotImplementedError(
                "is_named_optimizer=True (torch's _NamedOptimizer) is not supported"
            )
        _check_group(model, group)
        made = to_load(model, optim, optim_state_dict, _rank0_only(model))
        if load_directly:
            optim.load_state_dict(made)
        return made

    # --- FSDP1's older functions for optimizer state ---------------------------------------------

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """Return the optimizer's full state by parameter name, by default on rank 0 only.

        See zshard.optim_state_dict(). `optim_input` may be what the optimizer was constructed with;
        ValueError if that is something else.
        """
        _check_input(optim_input, optim)
        _check_group(model, group)
        return _optim_state_dict(model, optim, rank0_only=rank0_only)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: Mapping[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """Convert the result of full_optim_state_dict() into what load_state_dict() of the model's
        optimizer takes; all ranks have the dict.

        Collective. As FSDP.optim_state_dict_to_load(), which newer scripts call.

        Args:
            optim_input: what the optimizer is constructed with: parameters or param groups.
            optim: the optimizer. Without either: one of model.parameters(), in one param group.

        Raises ValueError if both are given, and as zshard.load_optim_state_dict() does.
        """
        like = _optimizer_like(model, optim_input, optim)
        return to_load(model, like, full_optim_state_dict, False)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: Mapping[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """The same as shard_full_optim_state_dict(), but only rank 0 has the dict.

        Other ranks pass None. Each rank receives its shards, so the result is valid on this rank
        only. Collective.
        """
        _check_group(model, group)
        like = _optimizer_like(model, optim_input, optim)
        return to_load(model, like, full_optim_state_dict, True)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: Mapping[str, Any],
        optim_state_key_type: Any,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """Return an optimizer's state dict with names for numbers, or numbers for names.

        For models that are not sharded: to load the result of full_optim_state_dict() into the
        optimizer of one, or what the optimizer of one saved into that of a sharded model. The order
        of parameters in a param group is kept. Not collective.

        Args:
            optim_state_dict: the state dict, by number or by name. One that has the requested keys
                already is returned as it is.
            optim_state_key_type: OptimStateKeyType.PARAM_NAME or PARAM_ID, zshard's or torch's.
            model: the model that the numbers are of, or will be.
            optim_input: what its optimizer is constructed with: parameters or param groups.
            optim: its optimizer. Without either: one of model.parameters(), in one param group.

        Raises ValueError for a parameter that is unknown or whose key is of neither kind.
        """
        to_names = _wants_names(optim_state_key_type)
        keys = [*optim_state_dict["state"]]
        for group in optim_state_dict["param_groups"]:
            keys += group["params"]
        kinds = {type(key) for key in keys}
        if kinds <= {str if to_names else int}:
            return dict(optim_state_dict)
        if kinds != {int if to_names else str}:
            found = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise ValueError(
                f"the state dict's parameters must all be numbered or all be named, got {found}"
            )
        keys_of = _keys_to_keys(_optimizer_like(model, optim_input, optim), model, to_names)
        return _rekeyed(optim_state_dict, keys_of)

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: Any, group: Any = None) -> NoReturn:
        """Not supported: NotImplementedError, which names what to call."""
        raise NotImplementedError(
            "FSDP.sharded_optim_state_dict() is not supported: zshard makes no ShardedTensor; save "
            "with zshard.save(directory, model, optimizer), which writes each rank's shards, or "
            "call FSDP.optim_state_dict(model, optim) for the full state"
        )

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: Any, model: nn.Module, optim: Any
    ) -> NoReturn:
        """Not supported: NotImplementedError, which names what to call."""
        raise NotImplementedError(
            "FSDP.flatten_sharded_optim_state_dict() is not supported: zshard makes no "
            "ShardedTensor; load with zshard.load(directory, model, optimizer), or call "
            "FSDP.optim_state_dict_to_load(model, optim, state) for a full state"
        )


def _first_state(model: nn.Module) -> State | None:
    return next((state for _, state in units_of(model)), None)


def _rank0_only(model: nn.Module) -> bool:
    state = _first_state(model)
    return state is not None and state.form.optim_rank0_only


def _check_group(model: nn.Module, group: Any) -> None:
    world = outermost_comm(model).world
    if group is not None and dist.get_world_size(group) != world:
        raise ValueError(
            f"group has {dist.get_world_size(group)} ranks, but the model has {world}: omit group "
            "to use the model's ranks"
        )


# --- numbers and names ----------------------------------------------------------------------------


def _check_input(optim_input: Any, optim: Optimizer) -> None:
    """Raise ValueError if the optimizer was not constructed with that."""
    if optim_input is None:
        return
    given = [id(param) for group in _groups(optim_input) for param in group]
    own = [id(param) for group in optim.param_groups for param in group["params"]]
    if given != own:
        raise ValueError(
            f"optim_input has {len(given)} parameters, which are not the {len(own)} of the "
            "optimizer in their order: omit optim_input"
        )


def _groups(optim_input: Any) -> list[list[Any]]:
    """The parameters of each param group."""
    listed = list(optim_input)
    if all(isinstance(each, Mapping) for each in listed):
        return [_as_list(group["params"]) for group in listed]
    return [[each[1] if isinstance(each, tuple) else each for each in listed]]


def _as_list(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _optimizer_like(model: nn.Module, optim_input: Any, optim: Optimizer | None) -> Optimizer:
    """Return the optimizer, or one that has the same parameters at the same numbers."""
    if optim is not None and optim_input is not None:
        raise ValueError("pass either optim or optim_input, not both")
    if optim is not None:
        return optim
    groups = [list(model.parameters())] if optim_input is None else _groups(optim_input)
    return torch.optim.SGD([{"params": group} for group in groups], lr=0.0)


def _wants_names(key_type: Any) -> bool:
    name = key_type.name if isinstance(key_type, enum.Enum) else key_type
    if name not in ("PARAM_NAME", "PARAM_ID"):
        raise ValueError(
            "optim_state_key_type must be OptimStateKeyType.PARAM_NAME or PARAM_ID, got "
            f"{key_type!r}"
        )
    return bool(name == "PARAM_NAME")


def _keys_to_keys(optim: Optimizer, model: nn.Module, to_names: bool) -> dict[Any, Any]:
    """Return the name of each number, or the number of each name, tied parameters' other names
    included."""
    first = names_of(model, optim)
    numbers = {
        id(param): number
        for number, param in enumerate(p for group in optim.param_groups for p in group["params"])
    }
    if to_names:
        return {number: first[param] for param, number in numbers.items()}
    named: Iterable[tuple[str, nn.Parameter]] = model.named_parameters(remove_duplicate=False)
    return {plain_name(name): numbers[id(p)] for name, p in named if id(p) in numbers}


def _rekeyed(state_dict: Mapping[str, Any], keys: Mapping[Any, Any]) -> dict[str, Any]:
    def key_of(old: Any) -> Any:
        if old not in keys:
            raise ValueError(
                f"the optimizer has no parameter {old!r}: pass the model that the state dict is for"
            )
        return keys[old]

    groups = [
        {
            **{k: copy.deepcopy(v) for k, v in group.items() if k != "params"},
            "params": [key_of(old) for old in group["params"]],
        }
        for group in state_dict["param_groups"]
    ]
    state = {key_of(old): value for old, value in state_dict["state"].items()}
    return {"state": state, "param_groups": groups}
