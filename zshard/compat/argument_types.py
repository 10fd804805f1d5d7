"""Types of the arguments of FSDP() and fully_shard().

A type checker accepts what the checks at run time accept: zshard's objects, their
names as strings, and torch's objects, so that a script has to change only its import. torch's FSDP
takes long to import, so only type checkers see its classes.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import nn

from zshard.compat.classes import MixedPrecision, MixedPrecisionPolicy, OffloadPolicy
from zshard.offload import Offload
from zshard.strategy import ShardingStrategy
from zshard.wrap import CustomPolicy

if TYPE_CHECKING:
    import torch.distributed.fsdp as torch_fsdp
    from torch.distributed import ProcessGroup

    TorchStrategy = torch_fsdp.ShardingStrategy
    TorchPrefetch = torch_fsdp.BackwardPrefetch
    TorchPrecision = torch_fsdp.MixedPrecision | torch_fsdp.MixedPrecisionPolicy
    TorchCPUOffload = torch_fsdp.CPUOffload
    TorchOffloadPolicy = torch_fsdp.OffloadPolicy
else:
    TorchStrategy = TorchPrefetch = enum.Enum
    ProcessGroup = TorchPrecision = TorchCPUOffload = TorchOffloadPolicy = Any


class TorchWrapPolicy(Protocol):
    """A policy object of torch.distributed.fsdp.wrap."""

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> dict[nn.Module, dict[str, Any]]: ...


# Where a literal stands next to `str`, editors complete it, and a script may still pass a string
# that it read from its command line; FSDP() checks the value.
StrategyLike = (
    Literal[
        "full_shard",
        "shard_grad_op",
        "zero1",
        "no_shard",
        "hybrid_shard",
        "hybrid_shard_zero2",
        "hybrid_full",
    ]
    | str
    | ShardingStrategy
    | TorchStrategy
)
ProcessGroupLike = ProcessGroup | tuple[ProcessGroup, ProcessGroup]
WrapPolicyLike = (
    Literal["auto"]
    | str
    | Collection[type[nn.Module]]
    | CustomPolicy
    | TorchWrapPolicy
    | Callable[..., bool]
)
PrefetchLike = Literal["backward_pre", "backward_post"] | str | TorchPrefetch
PrecisionLike = MixedPrecision | MixedPrecisionPolicy | TorchPrecision
InitFn = Callable[[nn.Module], Any]
DeviceLike = int | str | torch.device
OffloadLike = Offload | str | os.PathLike[str]
CPUOffloadLike = bool | Offload | OffloadPolicy | TorchCPUOffload | TorchOffloadPolicy
OffloadPolicyLike = Offload | OffloadPolicy | TorchOffloadPolicy
