"""FSDP2's API: `fully_shard(module)` is its name for FSDP(module).

This file only translates FSDP2's arguments: FSDP(...) could do everything here. One call makes one
unit, of the parameters that no earlier call on an inner module has taken, so a script calls it from
the leaves up:

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)

Its methods are those of all sharded models (`model/methods.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypedDict, TypeVar, Unpack, overload

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from zshard.api import (
    FSDP,
    Offload,
    ShardingStrategy,
    Wire,
    Wrapped,
    checks_names,
    register_forward_method,
    reset_or_leave,
    resolve_groups,
    state_of,
)

__all__ = [
    "FSDPModule",
    "FullyShardedDataParallel",
    "fully_shard",
    "register_fsdp_forward_method",
]

FSDPModule = FSDP  # for isinstance()
FullyShardedDataParallel = FSDP  # FSDP1's name
register_fsdp_forward_method = register_forward_method

_M = TypeVar("_M", bound=nn.Module)


class _Arguments(TypedDict, total=False):
    """The arguments of fully_shard() besides the module, for type checkers."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: Callable[[nn.Parameter], Any] | None
    mp_policy: Any  # a MixedPrecisionPolicy, zshard's or torch's
    offload_policy: Any  # an OffloadPolicy, likewise, or a zshard.Offload
    ignored_params: Iterable[nn.Parameter] | None
    dp_mesh_dims: object
    wire: str | Wire | None


@overload
def fully_shard(module: _M, **arguments: Unpack[_Arguments]) -> Wrapped[_M]: ...


@overload
def fully_shard(module: list[_M], **arguments: Unpack[_Arguments]) -> list[Wrapped[_M]]: ...


@overload
def fully_shard(
    module: tuple[_M, ...], **arguments: Unpack[_Arguments]
) -> tuple[Wrapped[_M], ...]: ...


@checks_names("fully_shard()")
def fully_shard(
    module: nn.Module | list[Any] | tuple[Any, ...],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: object = None,
    wire: str | Wire | None = None,
) -> Any:
    """Shard a module in place, as torch.distributed.fsdp.fully_shard (FSDP2), and return it.

    Makes one unit of the parameters of `module` that are in no unit yet, so call it from the leaves
    up. The module's class becomes a subclass of zshard.FSDP, which has FSDP2's methods. Between
    steps a parameter is this rank's shard: a plain tensor of shape (k, 1, ..., 1), not a DTensor.
    Parameters and buffers take rank 0's values.

    Collective: call it on all ranks, with the same model and arguments.

    Example::

        for block in model.blocks:
            zshard.fully_shard(block)
        zshard.fully_shard(model)
        optimizer = zshard.AdamW(model.parameters(), lr=3e-4)  # after sharding

    Args:
        module: the module, or a list or tuple of modules. Each module of a list becomes a unit of
            its own (FSDP2 makes one unit of them all; the results are the same).

    What is sharded, and over which ranks:

        mesh: a DeviceMesh: one-dimensional to shard over, or two-dimensional (replicate, shard).
            Default: None, all ranks; if torchrun started several, zshard initializes the default
            process group unless the script has.
        reshard_after_forward: True: reshard the parameters after forward ("full_shard"). False:
            keep them unsharded until backward ("shard_grad_op"). None (the default): as True, but a
            unit stays unsharded where gathers cross hosts and memory is left after the first steps
            (FSDP's keep_gathered="auto"). An int: the size of a shard group, for example the number
            of ranks on a host, which must divide the number of ranks; each group keeps secondary
            shards, from which forward and backward gather ("hybrid_full"). It has no effect over
            shm. The innermost call decides for all modules around it.
        ignored_params: parameters that zshard leaves alone, on every rank. Default: None.
        dp_mesh_dims: not supported, since zshard takes no DTensors. Must be None (the default).
        shard_placement_fn: not supported, since zshard shards each unit as one flat buffer. Must be
            None (the default).

    Communication:

        wire: how gradients and parameters cross hosts, as for FSDP(wire=...). Default: None, exact.

    Precision:

        mp_policy: a MixedPrecisionPolicy, zshard's or torch's. Default: no casts.

    Memory and offload:

        offload_policy: an OffloadPolicy or CPUOffloadPolicy, zshard's or torch's, or a
            zshard.Offload. On CPU ranks the policies have no effect, since everything is in host
            memory. Default: no offload.

    Returns `module` itself: the same module, list or tuple. Raises what FSDP() does.
    """
    modules: list[Any] = list(module) if isinstance(module, list | tuple) else [module]
    for each in modules:
        name = type(each).__name__
        if not isinstance(each, nn.Module):
            raise TypeError(f"fully_shard expects an nn.Module, got {name}")
        if "forward" not in vars(each) and type(each).forward is nn.Module.forward:
            raise ValueError(f"{name} has no forward: call fully_shard on each module in it")
    if shard_placement_fn is not None:
        raise NotImplementedError("fully_shard(shard_placement_fn=) is not supported: omit it")
    if dp_mesh_dims is not None:
        raise NotImplementedError(
            "fully_shard(dp_mesh_dims=) is not supported: pass mesh= the dimensions to shard over"
        )
    hybrid = _dimensions(mesh) == 2
    groups = _groups_to_keep_in(reshard_after_forward, mesh, hybrid)
    ignored = list(ignored_params or ())
    for param in ignored:
        if not isinstance(param, nn.Parameter):
            raise TypeError(f"ignored_params must contain parameters, got {type(param).__name__}")
    for each in modules:
        FSDP(
            each,
            groups,
            strategy=_strategy(reshard_after_forward, hybrid) if groups is None else "hybrid_full",
            device_mesh=mesh if groups is None else None,
            mixed_precision=mp_policy,
            offload=Offload.of(offload_policy, "offload_policy"),
            auto_wrap_policy=None,
            ignored_states=ignored,
            param_init_fn=reset_or_leave,
            wire=wire,
        )
        if reshard_after_forward is True:  # not by default: spare memory does not change this
            unit = state_of(each).unit
            unit.strategy = unit.strategy
    return module


def _dimensions(mesh: DeviceMesh | None) -> int:
    if mesh is None:
        return 1
    if not (hasattr(mesh, "ndim") and hasattr(mesh, "get_group")):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim not in (1, 2):
        raise ValueError(f"mesh must be (shard) or (replicate, shard), got {mesh.ndim} dimensions")
    if mesh.device_type not in ("cpu", "cuda"):
        raise NotImplementedError(f"mesh must be of CPUs or CUDA GPUs, got {mesh.device_type!r}")
    return int(mesh.ndim)


def _groups_to_keep_in(
    reshard_after_forward: bool | int | None, mesh: DeviceMesh | None, hybrid: bool
) -> tuple[ProcessGroup, ProcessGroup] | None:
    """Return the shard group and the replica group for `reshard_after_forward` as a number of
    ranks; None if it is not a number, or is one rank or all ranks."""
    number = reshard_after_forward
    if not isinstance(number, int) or isinstance(number, bool):
        return None
    if hybrid:
        raise NotImplementedError(
            f"reshard_after_forward must be True or False with a two-dimensional mesh, got {number}"
        )
    groups = resolve_groups(None, mesh, ShardingStrategy.FULL_SHARD)
    world = 1 if groups.world is None else dist.get_world_size(groups.world)
    if number < 1 or world % number != 0:
        raise ValueError(f"reshard_after_forward={number} does not divide the {world} ranks")
    return None if number in (1, world) else groups.split(number)


def _strategy(reshard_after_forward: bool | int | None, hybrid: bool) -> ShardingStrategy:
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, int)):
        what = "True, False, None or a number of ranks"
        raise TypeError(f"reshard_after_forward must be {what}, got {reshard_after_forward!r}")
    is_one = reshard_after_forward == 1 and reshard_after_forward is not True  # rank per group
    if reshard_after_forward is False or is_one:
        return ShardingStrategy.HYBRID_SHARD_ZERO2 if hybrid else ShardingStrategy.SHARD_GRAD_OP
    return ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD
