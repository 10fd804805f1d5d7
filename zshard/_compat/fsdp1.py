"""FSDP1's dialect: its arguments in zshard's words, and the methods of its modules.

The one idea: below this file, zshard knows its own words alone: a ShardingStrategy, a Precision, a
Prefetch, an Offload. Enums, dataclasses and configs are recognized by their names and fields, so
torch's own are accepted without importing its FSDP, which takes long.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from zshard._compat import fsdp2
from zshard._model.summon import full_params
from zshard._ranks.devices import CPU
from zshard._state_dict.form import state_dict_form
from zshard._state_dict.optimizer_names import (
    by_name,
    names_of,
    outermost_comm,
    to_load,
)
from zshard._state_dict.optimizer_names import optim_state_dict as _optim_state_dict
from zshard._units.units import Options, Prefetch, State, units_of
from zshard._wrap.tree import UnitSpec
from zshard.offload import Offload, offload_on, parse_offload
from zshard.precision import BATCH_NORMS, Precision, check_dtype
from zshard.strategy import ShardingStrategy, parse_strategy

_M = TypeVar("_M", bound=nn.Module)

_STATE_DICT_TYPES = {
    "FULL_STATE_DICT": False,
    "SHARDED_STATE_DICT": True,
    "LOCAL_STATE_DICT": True,
}
"""Whether the type contains shards."""

# --- arguments ------------------------------------------------------------------------------------


class Fsdp1Arguments(NamedTuple):
    """The arguments of FSDP() that say in FSDP1's words what Options say in zshard's."""

    sharding_strategy: Any
    cpu_offload: Any
    mixed_precision: Any
    backward_prefetch: Any
    forward_prefetch: Any
    limit_all_gathers: Any

    def options(self, strategy: Any, offload: Any, device: str) -> Options:
        """Return the options for a model on `device`. Raises ValueError, TypeError or
        NotImplementedError for a value that zshard does not support.

        strategy, offload: FSDP()'s arguments of these names, which are zshard's own.
        """
        gpu = device != CPU  # where a gather that has not gone ahead holds the GPU up
        return Options(
            _either_strategy(self.sharding_strategy, strategy),
            precision_of(self.mixed_precision),
            prefetch_of(
                self.backward_prefetch, self.forward_prefetch or gpu, self.limit_all_gathers
            ),
            offload_on(_either_offload(offload, self.cpu_offload), device),
        )


def check_use_orig_params(use_orig_params: bool) -> None:
    """Raise NotImplementedError for a value that zshard does not support."""
    if not use_orig_params:
        raise NotImplementedError(
            "use_orig_params=False is not supported: zshard always keeps the original parameters; "
            "omit use_orig_params"
        )


def _either_strategy(sharding_strategy: Any, strategy: Any) -> ShardingStrategy:
    if sharding_strategy is not None and strategy is not None:
        raise ValueError("pass either sharding_strategy or strategy (its short name), not both")
    given = strategy if strategy is not None else sharding_strategy
    return ShardingStrategy.FULL_SHARD if given is None else strategy_of(given)


def strategy_of(given: Any) -> ShardingStrategy:
    """Translate a strategy: a string, or an enum member of that name, such as torch's.

    Raises ValueError for an unknown name, TypeError for any other type.
    """
    name = given.name if isinstance(given, enum.Enum) else given
    if isinstance(name, str) and name.lower() == "_hybrid_shard_zero2":
        return ShardingStrategy.HYBRID_SHARD_ZERO2
    return parse_strategy(name)


def precision_of(given: Any) -> Precision:
    """Translate a MixedPrecision or, as FSDP() takes both, FSDP2's policy. None: nothing is cast.

    Raises TypeError for any other object, ValueError for a dtype that is not floating-point,
    NotImplementedError for keep_low_precision_grads.
    """
    if given is None:
        return Precision()
    if not hasattr(given, "param_dtype") or not hasattr(given, "reduce_dtype"):
        raise TypeError(
            "mixed_precision must be a MixedPrecision or MixedPrecisionPolicy, zshard's or "
            f"torch's, got {given!r}"
        )
    if hasattr(given, "output_dtype"):
        return fsdp2.precision_of(given)
    if getattr(given, "keep_low_precision_grads", False):
        raise NotImplementedError(
            "keep_low_precision_grads=True is not supported: gradients have the parameters' dtype; "
            "omit keep_low_precision_grads"
        )
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        check_dtype(name, getattr(given, name, None))
    casts = bool(given.cast_forward_inputs)
    keep = getattr(given, "_module_classes_to_ignore", None)
    return Precision(
        compute=given.param_dtype,
        wire=given.reduce_dtype,
        buffers=getattr(given, "buffer_dtype", None),
        cast_inputs=casts,
        cast_root_inputs=casts or bool(getattr(given, "cast_root_forward_inputs", False)),
        keep=BATCH_NORMS if keep is None else tuple(keep),
    )


def prefetch_of(backward_prefetch: Any, forward_prefetch: Any, limit_all_gathers: Any) -> Prefetch:
    """Translate the three arguments about prefetching. Raises ValueError for an unknown value."""
    name = backward_prefetch
    if isinstance(name, enum.Enum):
        name = name.name
    if isinstance(name, str):
        name = name.lower()
    if name not in (None, "backward_pre", "backward_post"):
        raise ValueError(
            "backward_prefetch must be 'backward_pre', 'backward_post' or None, got "
            f"{backward_prefetch!r}"
        )
    units = 1 if limit_all_gathers else 2
    return Prefetch(
        forward=units if forward_prefetch else 0,
        backward=units if name == "backward_pre" else 0,
    )


def _either_offload(offload: Any, cpu_offload: Any) -> Offload | None:
    cpu = offload_of(cpu_offload)
    if offload is not None and cpu is not None:
        raise ValueError("pass either offload or cpu_offload, not both")
    return parse_offload(offload) or cpu


def offload_of(cpu_offload: Any) -> Offload | None:
    """Translate a bool, a CPUOffload or, as FSDP() takes both, FSDP2's policy. None: everything
    stays in memory. Raises TypeError for anything else."""
    if cpu_offload is None or cpu_offload is False:
        return None
    if cpu_offload is True:
        return Offload()
    if isinstance(cpu_offload, Offload):
        return cpu_offload
    params = getattr(cpu_offload, "offload_params", None)
    if isinstance(params, bool):
        return Offload(grads=True) if params else None
    if fsdp2.is_offload_policy(cpu_offload):
        return fsdp2.offload_of(cpu_offload)
    raise TypeError(
        "cpu_offload must be a bool, torch's CPUOffload or CPUOffloadPolicy, or a zshard.Offload, "
        f"got {cpu_offload!r}"
    )


def unit_options(spec: UnitSpec, usual: Options) -> Options:
    """Return the model's options with a CustomPolicy's overrides for this unit. Raises ValueError
    for an override that only applies to a whole model."""
    strategy: ShardingStrategy = usual.strategy
    precision: Precision = usual.precision
    given = spec.overrides.get("sharding_strategy", spec.overrides.get("strategy"))
    if given is not None:
        strategy = strategy_of(given)
    if strategy is not usual.strategy and (strategy.is_hybrid or strategy.keeps):
        raise ValueError(
            f"unit '{spec.name}' requests strategy {strategy.value!r}, but the model has "
            f"{usual.strategy.value!r}: hybrid strategies and zero1 apply to whole models; set "
            "them on the outermost FSDP(...)"
        )
    given = spec.overrides.get("mixed_precision")
    if given is not None:
        precision = precision_of(given)
    return usual._replace(strategy=strategy, precision=precision)


# --- full parameters, the form of state dicts -----------------------------------------------------


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Context manager that unshards the parameters of `module`, in their original shape and dtype.

    Collective; use it outside forward and backward. Takes memory for the full parameters, and with
    `with_grads` for the full gradients.

    Args:
        module: a sharded module, or one that contains sharded modules.
        recurse: include all units at and below `module`; else only its own.
        writeback: keep changes: on exit each rank keeps its shard of what was written. Write the
            same values on all ranks. False discards changes.
        rank0_only: unshard on rank 0 only (other ranks still take part). Requires writeback=False.
        offload_to_cpu: accepted for compatibility; no effect.
        with_grads: also unshard `.grad`, and keep or discard what is written or assigned to it. A
            rank without a gradient contributes zeros; `.grad` is None if no rank has one. A `.grad`
            accumulated within no_sync() is unsharded already and stays local to its rank.

    Raises ValueError for rank0_only with writeback; RuntimeError during a backward, and if only
    some ranks have accumulated a gradient within no_sync().
    """
    if rank0_only and writeback:
        raise ValueError("rank0_only=True requires writeback=False")
    states = [state for each, state in units_of(module) if recurse or each is module]
    with full_params(states, writeback, rank0_only, with_grads):
        yield


@contextlib.contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: Any,
    state_dict_config: Any = None,
    optim_state_dict_config: Any = None,
) -> Iterator[None]:
    """Context manager that sets what state_dict() of `module` and of its units returns.

    Args:
        module: a module with sharded modules.
        state_dict_type: a torch.distributed.fsdp.StateDictType, or its name.
            FULL_STATE_DICT: full tensors (the default outside this context).
            SHARDED_STATE_DICT or LOCAL_STATE_DICT, equivalent here: this rank's shard of each
            sharded parameter, a 1-D copy under the plain name; full buffers and unsharded
            parameters. Not collective. load_state_dict() accepts such shards within this context,
            on the rank that has the same ones (the dict's `_metadata` records which: keep it, as
            torch.save does), and full tensors as everywhere.
        state_dict_config: a FullStateDictConfig. With `rank0_only`, other ranks get an empty dict
            and unshard one unit at a time. `offload_to_cpu` is ignored.
        optim_state_dict_config: the same for FSDP.optim_state_dict(). With `rank0_only`, only rank
            0 passes a dict to FSDP.optim_state_dict_to_load().

    Raises ValueError for an unknown type.
    """
    name = state_dict_type.name if isinstance(state_dict_type, enum.Enum) else state_dict_type
    if name not in _STATE_DICT_TYPES:
        known = ", ".join(map(repr, _STATE_DICT_TYPES))
        raise ValueError(f"unknown state_dict_type {name!r}: expected one of {known}")
    configs = state_dict_config, optim_state_dict_config
    own, optim = (bool(getattr(config, "rank0_only", False)) for config in configs)
    slices = _STATE_DICT_TYPES[name]
    with state_dict_form(module, slices=slices, rank0_only=own, optim_rank0_only=optim):
        yield


def modules_of(kind: type[_M], module: nn.Module, root_only: bool) -> list[_M]:
    """Return the modules of class `kind` at and below `module`, parents first; with `root_only`
    those that are not inside another one."""
    found = [m for m in module.modules() if isinstance(m, kind)]
    if not root_only:
        return found
    inner = {id(child) for unit in found for child in unit.modules() if child is not unit}
    return [unit for unit in found if id(unit) not in inner]


# --- methods --------------------------------------------------------------------------------------


class Fsdp1Methods(nn.Module):
    """The methods of FSDP1's modules."""

    summon_full_params = summon_full_params
    state_dict_type = staticmethod(state_dict_type)

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

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """Return the optimizer's full state by parameter name, by default on rank 0 only.

        See zshard.optim_state_dict(). `optim_input` must be None (NotImplementedError).
        """
        if optim_input is not None:
            raise NotImplementedError(
                "full_optim_state_dict(): optim_input is not supported: omit it"
            )
        _check_group(model, group)
        return _optim_state_dict(model, optim, rank0_only=rank0_only)


def _first_state(model: nn.Module) -> State | None:
    return next((state for _, state in units_of(model)), None)


def _rank0_only(model: nn.Module) -> bool:
    state = _first_state(model)
    return state is not None and state.optim_rank0_only


def _check_group(model: nn.Module, group: Any) -> None:
    world = outermost_comm(model).world
    if group is not None and dist.get_world_size(group) != world:
        raise ValueError(
            f"group has {dist.get_world_size(group)} ranks, but the model has {world}: omit group "
            "to use the model's ranks"
        )
