"""`fully_shard(module)`: FSDP2's spelling of FSDP(module).

The one idea: nothing is done here that FSDP(...) could not do; this file says what FSDP2's
arguments mean in its terms. One call makes one unit, of the parameters that no earlier call on an
inner module has taken, so a script calls it from the leaves up:

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)

Policy objects are known by what they have and are called, so torch's own are taken as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from zshard._group import block_of, column_of, resolve_groups
from zshard._plan import has_forward
from zshard.api import FSDP
from zshard.offload import Offload, OffloadPolicy, is_policy
from zshard.precision import MixedPrecisionPolicy
from zshard.strategy import ShardingStrategy

_NO_CASTS = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()


def fully_shard(
    module: nn.Module | list[nn.Module] | tuple[nn.Module, ...],
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: Any = _NO_CASTS,
    offload_policy: Any = _NO_OFFLOAD,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> Any:
    """Makes one unit of the parameters of `module` that are in no unit yet; returns the module.

    Of several modules, in a list, one unit each (FSDP2 makes one of them all; the numbers are the
    same). Its class becomes a subclass of zshard.FSDP, which has FSDP2's methods. Between steps a
    parameter is this rank's slice, a plain tensor of shape (k, 1, ..., 1), not a DTensor. Values
    and buffers are taken from rank 0. Collective.

    mesh: a DeviceMesh of one dimension, to shard over, or of two, (replicate, shard); all ranks if
        None (the default process group is made under torchrun if the script has made none).
    reshard_after_forward: True gives the whole parameters back after forward ("full_shard"), False
        keeps them for the backward ("shard_grad_op"). None is True but for the outermost module;
        here it is the same as True: over shm resharding costs nothing, and over c10d the outermost
        module is kept always. A number of ranks, a host's say, which divides the ranks to shard
        over: so many neighbours keep a copy of the parameters cut over them, from which forward and
        backward gather ("hybrid_full"; FSDP2 and ZeRO++ do so for the backward). The innermost call
        decides for all that holds it. Over shm it makes no difference: all ranks read the shards
        where they lie.
    shard_placement_fn: not supported; units are cut as flat buffers.
    mp_policy: a MixedPrecisionPolicy, zshard's or torch's.
    offload_policy: zshard's or torch's (on CPU ranks all is in host memory anyway), or a
        zshard.Offload.
    ignored_params: parameters that are left alone on every rank.

    Raises ValueError or TypeError for what cannot be sharded, NotImplementedError for an argument
    whose feature is not in this version, naming it; DivergenceError (on every rank) if the ranks'
    models differ.
    """
    if isinstance(module, list | tuple):
        for each in module:
            _check_module(each)
        for each in module:
            fully_shard(
                each,
                mesh=mesh,
                reshard_after_forward=reshard_after_forward,
                shard_placement_fn=shard_placement_fn,
                mp_policy=mp_policy,
                offload_policy=offload_policy,
                ignored_params=ignored_params,
            )
        return module
    _check_module(module)
    if shard_placement_fn is not None:
        raise NotImplementedError(
            "fully_shard(shard_placement_fn=...) is not in this version of zshard: a unit's "
            "parameters are cut as one flat buffer; leave it out"
        )
    _check_offload(offload_policy)
    hybrid = _dimensions(mesh) == 2
    groups = _groups_to_keep_in(reshard_after_forward, mesh, hybrid)
    return FSDP(
        module,
        groups,
        _strategy(reshard_after_forward, hybrid) if groups is None else "hybrid_full",
        device_mesh=mesh if groups is None else None,
        mixed_precision=mp_policy,
        cpu_offload=offload_policy,
        auto_wrap_policy=None,
        ignored_states=_params(ignored_params),
    )


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard takes an nn.Module, not {type(module).__name__}")
    if not has_forward(module):
        raise ValueError(
            f"a {type(module).__name__} has no forward, so nothing could make its parameters whole "
            "in time: call fully_shard on each module in it"
        )


def _dimensions(mesh: Any) -> int:
    """How many dimensions the mesh has; 1 where there is none."""
    if mesh is None:
        return 1
    if not (hasattr(mesh, "ndim") and hasattr(mesh, "get_group")):
        raise TypeError(f"mesh takes a DeviceMesh, not {type(mesh).__name__}")
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions; it takes one to shard over, or two "
            "(replicate, shard)"
        )
    if mesh.device_type != "cpu":
        raise NotImplementedError(
            f"fully_shard(mesh=...) of device type {mesh.device_type!r}: this version trains on "
            "the CPU"
        )
    return int(mesh.ndim)


def _groups_to_keep_in(reshard_after_forward: Any, mesh: Any, hybrid: bool) -> Any:
    """The process groups that a number of ranks means; None where it is none, or all ranks, or
    one."""
    number = reshard_after_forward
    if not isinstance(number, int) or isinstance(number, bool):
        return None
    if hybrid:
        raise NotImplementedError(
            f"fully_shard(reshard_after_forward={number}) with a mesh of two dimensions is not in "
            "this version of zshard; give True or False"
        )
    group = resolve_groups(None, mesh, ShardingStrategy.FULL_SHARD).world
    world = 1 if group is None else dist.get_world_size(group)
    if number < 1 or world % number != 0:
        raise ValueError(
            f"reshard_after_forward={number} does not divide the {world} ranks to shard over"
        )
    if number in (1, world):
        return None
    return block_of(group, number), column_of(group, number)


def _strategy(reshard_after_forward: Any, hybrid: bool) -> ShardingStrategy:
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, int)):
        raise TypeError(
            "reshard_after_forward is True, False, None or a number of ranks, not "
            f"{reshard_after_forward!r}"
        )
    keep = reshard_after_forward is False
    if reshard_after_forward == 1 and reshard_after_forward is not True:
        keep = True  # to one rank: whole
    if keep:
        return ShardingStrategy.HYBRID_SHARD_ZERO2 if hybrid else ShardingStrategy.SHARD_GRAD_OP
    return ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD


def _check_offload(policy: Any) -> None:
    if policy is not None and not isinstance(policy, Offload) and not is_policy(policy):
        raise TypeError(f"offload_policy takes an OffloadPolicy, not {policy!r}")


def _params(ignored: Iterable[nn.Parameter] | None) -> list[nn.Parameter]:
    params = list(ignored or ())
    for param in params:
        if not isinstance(param, nn.Parameter):
            raise TypeError(f"ignored_params holds parameters, not {type(param).__name__}")
    return params
