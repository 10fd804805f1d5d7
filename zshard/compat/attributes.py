"""Attributes that torch's wrappers have beside methods: `model.rank`, `model.sharding_strategy`.

A module keeps what it has. These names are looked up only where neither the module
nor its class has them, since many models have a `rank` or a `device` of their own. A name that
means nothing in zshard is an AttributeError, so hasattr() is False; the message says what to use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zshard.compat.classes import BackwardPrefetch, CPUOffload, MixedPrecision
from zshard.precision import Precision
from zshard.ranks.transports import group_of
from zshard.strategy import ShardingStrategy
from zshard.units.units import State, is_unit, state_of

# --- values ---------------------------------------------------------------------------------------


def _sharding_strategy(state: State) -> ShardingStrategy:
    usual = state.options.strategy
    if state.unit.strategy == usual.in_group.value:
        return usual
    if usual.is_hybrid:  # set_reshard_after_forward() has changed it
        hybrids = ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2
        return next(each for each in hybrids if each.in_group.value == state.unit.strategy)
    return ShardingStrategy(state.unit.strategy)


def _process_group(state: State) -> Any:
    """The group that the model is sharded over; None, as for torch, is the default group."""
    return group_of(state.comms.shards) if state.group_given is None else state.group_given


def _mixed_precision(state: State) -> MixedPrecision:
    own = state.options.precision
    if own == Precision():
        return MixedPrecision()
    return MixedPrecision(
        param_dtype=own.compute,
        reduce_dtype=own.wire,
        buffer_dtype=own.buffers,
        cast_forward_inputs=own.cast_inputs,
        cast_root_forward_inputs=own.cast_root_inputs,
        _module_classes_to_ignore=own.keep,
    )


def _backward_prefetch(state: State) -> BackwardPrefetch:
    ahead = state.options.prefetch.backward > 0
    return BackwardPrefetch.BACKWARD_PRE if ahead else BackwardPrefetch.BACKWARD_POST


def _device(state: State) -> torch.device:
    return next((param.device for param in state.unit.params), torch.device("cpu"))


def _device_ids(state: State) -> list[int] | None:
    device = _device(state)
    return None if device.type == "cpu" else [device.index or 0]


def _output_device(state: State) -> int | None:
    ids = _device_ids(state)
    return None if ids is None else ids[0]


_OF_STATE: dict[str, Callable[[State], Any]] = {
    # FSDP1
    "sharding_strategy": _sharding_strategy,
    "process_group": _process_group,
    "rank": lambda state: state.comms.shards.rank,
    "world_size": lambda state: state.comms.shards.world,
    "mixed_precision": _mixed_precision,
    "cpu_offload": lambda state: CPUOffload(state.options.offload is not None),
    "backward_prefetch": _backward_prefetch,
    "forward_prefetch": lambda state: state.options.prefetch.forward_asked,
    "limit_all_gathers": lambda state: max(state.options.prefetch.ahead) < 2,
    "compute_device": _device,
    "_is_root": lambda state: not state.unit.name,
    "_use_orig_params": lambda state: True,
    # DDP
    "device": _device,
    "device_type": lambda state: _device(state).type,
    "device_ids": _device_ids,
    "output_device": _output_device,
    "dim": lambda state: 0,
    "is_multi_device_module": lambda state: False,
    "broadcast_buffers": lambda state: bool(state.sync_buffers),
    "forward_sync_buffers": lambda state: bool(state.sync_buffers),
    "find_unused_parameters": lambda state: True,
    "static_graph": lambda state: False,
    "gradient_as_bucket_view": lambda state: False,
}
_OF_MODULE: dict[str, Callable[[Any], Any]] = {"_fsdp_wrapped_module": lambda module: module.module}

# --- names without a meaning ----------------------------------------------------------------------

_OF_CLASS = (  # functions that scripts call as FSDP.name(...)
    "flatten_sharded_optim_state_dict full_optim_state_dict rekey_optim_state_dict "
    "scatter_full_optim_state_dict shard_full_optim_state_dict sharded_optim_state_dict"
)
_FSDP1 = "_flat_param _handle params training_state register_comm_hook"
_FSDP2 = (
    "finalize_backward reset_iter_state set_all_reduce_hook "
    "set_allocate_memory_from_process_group_for_comm "
    "set_custom_all_gather set_custom_reduce_scatter set_force_sum_reduction_for_comms "
    "set_keep_unsharded_storage set_manual_backward_finalization "
    "set_post_optim_event set_reduce_scatter_max_input_buffers set_reduce_scatter_unused_params "
    "set_separate_reduce_scatter_group set_symm_mem_for_comm set_unshard_in_backward "
    "_get_fsdp_state _set_unshard_async_op"
)
_DDP = (
    "_get_ddp_logging_data _register_buffer_comm_hook _register_builtin_comm_hook "
    "_register_fused_optim batched_grad_copy broadcast_bucket_size bucket_bytes_cap gather "
    "join_device join_hook join_process_group lazy_bucket_allocation logger modules_buffers "
    "named_module_buffers require_manual_backward_finalization should_finalize_after_backward "
    "parameters_to_ignore reducer require_forward_param_sync scatter "
    "skip_all_reduce_unused_params to_kwargs use_side_stream_for_tensor_copies"
)
NOT_HERE = frozenset(f"{_OF_CLASS} {_FSDP1} {_FSDP2} {_DDP}".split())
"""Names that zshard's modules do not have; docs/migration.md says what to use."""

_NAMES = frozenset({*_OF_STATE, *_OF_MODULE, *NOT_HERE})


def _not_here(name: str) -> AttributeError:
    return AttributeError(
        f"{name!r} of torch's FSDP and DDP is not available on modules sharded by zshard: see "
        "docs/migration.md for what to use instead"
    )


class _NotHere:
    """A function of FSDP1's class that zshard's lacks."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: type) -> Any:
        raise _not_here(self.name)


class TorchAttributes(nn.Module):
    """The attributes of torch's wrappers, for modules that lack them."""

    def __getattr__(self, name: str) -> Any:
        if name not in _NAMES:
            return super().__getattr__(name)
        try:
            return super().__getattr__(name)  # a parameter, buffer or child; or the model's way
        except AttributeError:
            if not is_unit(self):
                raise
        if name in _OF_STATE:
            return _OF_STATE[name](state_of(self))
        if name in _OF_MODULE:
            return _OF_MODULE[name](self)
        raise _not_here(name)


for _name in _OF_CLASS.split():
    setattr(TorchAttributes, _name, _NotHere(_name))
