"""Attributes that torch's wrappers have beside methods: `model.rank`, `model.sharding_strategy`.

The one idea: a module keeps what it has. These names are looked up only where neither the module
nor its class has them, since many models have a `rank` or a `device` of their own. A name that
means nothing in zshard is an AttributeError, so hasattr() is False; the message says what to use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zshard._compat.classes import BackwardPrefetch, CPUOffload, MixedPrecision
from zshard._ranks.transports import group_of
from zshard._units.units import State, is_unit, state_of
from zshard.precision import Precision
from zshard.strategy import ShardingStrategy

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

_NO_FLAT = (
    "zshard has no flat parameters that a script may touch: use model.parameters(), and "
    "FSDP.summon_full_params(model) for full values"
)
_NO_HOOK = (
    "zshard reduces gradients in its core: choose the dtype in which they travel by "
    "MixedPrecision(reduce_dtype=...), and change gradients between backward() and "
    "optimizer.step(), or by p.register_post_accumulate_grad_hook()"
)
_NO_COLLECTIVE = (
    "zshard runs its own collectives: choose them by FSDP(transport=...), on GPUs with a "
    "zshard.NcclOptions"
)
_NO_BUCKETS = (
    "zshard reduces one unit at a time, not buckets: choose units by FSDP(auto_wrap_policy=...)"
)
_ONE_DEVICE = "a rank trains on one device: move inputs there with .to(), in your script"
_OWN_JOIN = "call `with model.join(optimizer):`, which takes the place of torch's Join"
_NO_REDUCER = "zshard has no reducer or logger: see model.summary() and model.memory()"

REFUSED: dict[str, str] = {
    # FSDP1
    "_flat_param": _NO_FLAT,
    "_handle": _NO_FLAT,
    "params": _NO_FLAT,
    "training_state": "a unit has no state that a script may read between calls",
    "register_comm_hook": _NO_HOOK,
    # FSDP2
    "set_all_reduce_hook": _NO_HOOK,
    "set_custom_all_gather": _NO_COLLECTIVE,
    "set_custom_reduce_scatter": _NO_COLLECTIVE,
    "set_symm_mem_for_comm": _NO_COLLECTIVE,
    "_get_fsdp_state": "zshard's state is its own: see model.summary() and zshard.shard_info(p)",
    # DDP
    "_register_builtin_comm_hook": _NO_HOOK,
    "_register_buffer_comm_hook": "pass FSDP(forward_sync_buffers=True)",
    "_register_fused_optim": "call model.optimizer_in_backward(optimizer)",
    "join_hook": _OWN_JOIN,
    "join_device": _OWN_JOIN,
    "join_process_group": _OWN_JOIN,
    "gather": _ONE_DEVICE,
    "scatter": _ONE_DEVICE,
    "to_kwargs": _ONE_DEVICE,
    "use_side_stream_for_tensor_copies": _ONE_DEVICE,
    "reducer": _NO_REDUCER,
    "logger": _NO_REDUCER,
    "_get_ddp_logging_data": _NO_REDUCER,
    "parameters_to_ignore": "pass ignored_modules or ignored_states to FSDP()",
    "modules_buffers": "use model.buffers()",
    "named_module_buffers": "use model.named_buffers()",
    "require_forward_param_sync": "buffers are broadcast by FSDP(forward_sync_buffers=True)",
    "skip_all_reduce_unused_params": "a unit that no rank has used is never reduced",
    "batched_grad_copy": _NO_BUCKETS,
    "broadcast_bucket_size": _NO_BUCKETS,
    "bucket_bytes_cap": _NO_BUCKETS,
    "bucket_bytes_cap_list": _NO_BUCKETS,
    "bucket_bytes_cap_default": _NO_BUCKETS,
}
"""What to do instead, for names that zshard's modules do not have."""

AVAILABLE = frozenset({*_OF_STATE, *_OF_MODULE})
_NAMES = AVAILABLE | REFUSED.keys()


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
        raise AttributeError(
            f"{name!r} of torch's wrappers is not available on modules sharded by zshard: "
            f"{REFUSED[name]}"
        )
