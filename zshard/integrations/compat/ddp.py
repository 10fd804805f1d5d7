"""DDP's API: `DistributedDataParallel(module)` is FSDP(module, strategy="no_shard").

This file translates arguments. Every rank keeps all parameters, as under DDP, unless the script
chooses another strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from zshard.api import (
    ARGUMENTS,
    FSDP,
    ShardingStrategy,
    Wrapped,
    checks_names,
    is_unit,
)

__all__ = ["DistributedDataParallel"]

_M = TypeVar("_M", bound=nn.Module)

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch's attribute of a module


class _FoundByInstance(type):
    """Make isinstance(model, DistributedDataParallel) true for models that zshard has wrapped,
    which are instances of FSDP and of their own class."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, FSDP) and is_unit(instance)


class DistributedDataParallel(FSDP, metaclass=_FoundByInstance):
    """Wrap a module for data-parallel training, as torch.nn.parallel.DistributedDataParallel.

    The result is that of FSDP(module, strategy="no_shard"): the module itself, so state dicts have
    no `module.` prefix. isinstance(model, DistributedDataParallel) is true for all models that
    zshard has wrapped.

    Collective: call it on all ranks, with the same model and arguments.

    Args:
        module: the nn.Module to wrap.
        device_ids: a list of one GPU, or None (the default): the device of the parameters.
        output_device: must be the device of `device_ids`, or None (the default).
        dim: must be 0 (the default).
        broadcast_buffers, forward_sync_buffers: two names of one argument. True (the default):
            broadcast buffers from rank 0 in each forward.
        init_sync: True (the default): take parameters and buffers from rank 0. False: ranks whose
            values differ raise DivergenceError.
        process_group: the ranks to train on. Default: None, all ranks.
        device_mesh: a one-dimensional DeviceMesh, instead of process_group. Default: None.
        find_unused_parameters, static_graph, check_reduction, skip_all_reduce_unused_params:
            accepted; no effect: unused parameters are found, and graphs may change.
        bucket_cap_mb, bucket_cap_mb_list, gradient_as_bucket_view, batched_grad_copy,
            lazy_bucket_allocation: accepted; no effect: zshard reduces one unit at a time (FSDP's
            auto_wrap_policy).
        delay_all_reduce_named_params, param_to_hook_all_reduce, mixed_precision: not supported;
            must be None (the default).
        strategy: zshard's own: another strategy of FSDP(), such as "full_shard". Default:
            "no_shard".
        options: other arguments of FSDP(), by name.

    Raises what FSDP() does.
    """

    @checks_names("DistributedDataParallel()", ARGUMENTS)
    def __new__(
        cls,
        module: _M,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | tuple[ProcessGroup, ProcessGroup] | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: object = None,
        param_to_hook_all_reduce: object = None,
        mixed_precision: object = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        strategy: str | ShardingStrategy = "no_shard",
        **options: Any,
    ) -> Wrapped[_M]:
        device_ids = device_ids or None  # DDP accepts an empty list
        unsupported = {
            "delay_all_reduce_named_params=": delay_all_reduce_named_params is not None,
            "param_to_hook_all_reduce=": param_to_hook_all_reduce is not None,
            "mixed_precision= (FSDP() takes a zshard.MixedPrecision)": mixed_precision is not None,
            f"dim={dim}": dim != 0,
            f"output_device={output_device!r} with device_ids={device_ids!r}": (
                output_device is not None and [output_device] != list(device_ids or ())
            ),
            f"{_IGNORED} (FSDP() takes ignored_states=)": _IGNORED
            in getattr(module, "__dict__", {}),
        }
        for name in (name for name, is_passed in unsupported.items() if is_passed):
            raise NotImplementedError(f"DistributedDataParallel does not support {name}: omit it")
        if broadcast_buffers is not None and forward_sync_buffers is not None:
            raise ValueError("pass either broadcast_buffers or forward_sync_buffers, not both")
        sync = forward_sync_buffers if broadcast_buffers is None else broadcast_buffers
        return FSDP(
            module,
            process_group,
            strategy=strategy,
            device_ids=device_ids,
            device_mesh=device_mesh,
            sync_module_states=init_sync,
            forward_sync_buffers=True if sync is None else bool(sync),
            **options,
        )
