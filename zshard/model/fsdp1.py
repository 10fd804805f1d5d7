"""FSDP1's methods: state dict types, and optimizer state.

A type and its two configs map to one form of zshard's (`state/__init__.py`), which keeps what the
script passed, so that the script can query it. Optimizer state is full, by parameter name, and
loads under any strategy. The arguments of FSDP() are also FSDP1's (`zshard/options.py`).
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from zshard._errors import check_choice, warn
from zshard.model.own_names import ModelNamesFirst, yields_to_the_model
from zshard.model.summon import summon_full_params
from zshard.ranks.agreement import PublicCall
from zshard.state import optimizer_names, state_dict_form
from zshard.units.units import StateDictForm, units_of

if TYPE_CHECKING:  # takes as long to import as the rest of zshard
    from torch.distributed.fsdp import StateDictSettings

_KINDS = {"FULL_STATE_DICT": "Full", "SHARDED_STATE_DICT": "Sharded", "LOCAL_STATE_DICT": "Local"}
"""First part of each type's config names, as in torch's FullStateDictConfig."""


@contextlib.contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: object,
    state_dict_config: object = None,
    optim_state_dict_config: object = None,
) -> Iterator[None]:
    """Context manager that sets what state_dict() of `module` and of its units returns.

    Args:
        module: a module with sharded modules.
        state_dict_type: torch's StateDictType, or its name. All mean full tensors. For
            SHARDED_STATE_DICT and LOCAL_STATE_DICT that is a warning: zshard.save() writes each
            rank's shards and gathers nothing.
        state_dict_config: the type's config: torch's FullStateDictConfig, ShardedStateDictConfig
            or LocalStateDictConfig. With `rank0_only`, other ranks get an empty
            dict and unshard one unit at a time. `offload_to_cpu` is ignored.
        optim_state_dict_config: the same for FSDP.optim_state_dict(). With `rank0_only`, only rank
            0 passes a dict to FSDP.optim_state_dict_to_load().

    Raises ValueError for an unknown type, TypeError for the config of another type.
    """
    form = _form(state_dict_type, state_dict_config, optim_state_dict_config)
    with state_dict_form(module, *form):
        yield


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: object,
    state_dict_config: object = None,
    optim_state_dict_config: object = None,
) -> StateDictSettings:
    """Set what state_dict() of `module` and of its units returns from now on.

    Takes the arguments of FSDP.state_dict_type(), raises what it does, and RuntimeError as
    FSDP.get_state_dict_type() does. Nothing changes then.

    Returns the settings before, whose fields a later call takes to restore them.
    """
    before = get_state_dict_type(module)
    form = _form(state_dict_type, state_dict_config, optim_state_dict_config)
    for _, state in units_of(module):
        state.form = form
    return before


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Return the StateDictSettings that are in effect for `module`: the type and the configs, as
    the script passed them. By default, and without sharded modules: FULL_STATE_DICT.

    Raises RuntimeError if the units of `module` have different settings.
    """
    default: StateDictSettings = _form("FULL_STATE_DICT", None, None).settings
    of_units = [(s.unit.name, s.form.settings or default) for _, s in units_of(module)]
    for name, settings in of_units:
        if repr(settings) != repr(of_units[0][1]):
            raise RuntimeError(
                f"unit '{name}' has another state dict type, {settings}, than '{of_units[0][0]}', "
                f"{of_units[0][1]}: call FSDP.set_state_dict_type() on the root"
            )
    return of_units[0][1] if of_units else default


def _form(asked: object, config: object, optim_config: object) -> StateDictForm:
    from torch.distributed import fsdp

    name: Any = asked.name if isinstance(asked, enum.Enum) else asked
    check_choice("state_dict_type", name, tuple(_KINDS))
    configs: dict[str, Any]
    configs = {"state_dict_config": config, "optim_state_dict_config": optim_config}
    for (argument, passed), part in zip(configs.items(), ("", "Optim"), strict=True):
        kind = getattr(fsdp, f"{_KINDS[name]}{part}StateDictConfig")
        if passed is None:
            configs[argument] = kind()
        elif not isinstance(passed, kind):
            raise TypeError(f"{argument} for {name} must be a {kind.__name__}, got {passed!r}")
    if name != "FULL_STATE_DICT":
        warn(f"{name} has full tensors here: for each rank's shards, use zshard.save()")
    of_model, of_optim = (bool(getattr(each, "rank0_only", False)) for each in configs.values())
    settings = fsdp.StateDictSettings(fsdp.StateDictType[name], **configs)
    return StateDictForm(of_model, of_optim, settings)


@yields_to_the_model
class Fsdp1Methods(ModelNamesFirst):
    """The methods of FSDP1's modules."""

    summon_full_params = summon_full_params
    state_dict_type = staticmethod(state_dict_type)
    set_state_dict_type = staticmethod(set_state_dict_type)
    get_state_dict_type = staticmethod(get_state_dict_type)

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: Mapping[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
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
            return optimizer_names.optim_state_dict(model, optim, rank0_only=rank0_only)
        if rank0_only and optimizer_names.outermost_comm(model).rank != 0:
            return {}
        names = optimizer_names.names_of(model, optim)
        return optimizer_names.by_name(names, optim, optim_state_dict)

    @staticmethod
    @PublicCall("optim_state_dict_to_load()")
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: Mapping[str, Any] | None,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
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
                "is_named_optimizer=True is not supported: pass a plain optimizer"
            )
        _check_group(model, group)
        converted = optimizer_names.to_load(model, optim, optim_state_dict, _rank0_only(model))
        if load_directly:
            optim.load_state_dict(converted)
        return converted


def _rank0_only(model: nn.Module) -> bool:
    return any(state.form.optim_rank0_only for _, state in units_of(model))


def _check_group(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    world = optimizer_names.outermost_comm(model).world
    if group is not None and (size := dist.get_world_size(group)) != world:
        raise ValueError(f"group has {size} ranks, but the model has {world}: omit group")
