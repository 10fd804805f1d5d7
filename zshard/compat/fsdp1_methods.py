"""The methods of FSDP1's modules: state dict types, optimizer state, and questions about units.

Optimizer state is full, by parameter name, and loads under any strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from zshard.compat.state_dict_types import (
    get_state_dict_type,
    set_state_dict_type,
    state_dict_type,
)
from zshard.model.summon import summon_full_params
from zshard.state.optimizer_names import (
    by_name,
    names_of,
    outermost_comm,
    to_load,
)
from zshard.state.optimizer_names import optim_state_dict as _optim_state_dict
from zshard.units.units import State, state_of, units_of


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
