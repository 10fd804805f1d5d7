"""The argument classes of FSDP1 and FSDP2 scripts: torch's own, and those that zshard needs itself.

They only carry values. FSDP() recognizes them by their names and fields. Importing torch's takes as
long as the rest of zshard, so only zshard.compat imports this file.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from zshard.model.methods import GradientReductionHandle, UnshardHandle
from zshard.offload import CPUOffload, CPUOffloadPolicy, OffloadPolicy
from zshard.precision import MixedPrecisionPolicy

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "GradientReductionHandle",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnshardHandle",
]


class FlatParameter(nn.Parameter):
    """FSDP1's class for isinstance(p, FlatParameter), which no parameter in zshard is."""

    def __new__(cls, *args: object, **kwargs: object) -> FlatParameter:
        raise TypeError("FlatParameter cannot be constructed: zshard keeps the original parameters")


@dataclass(frozen=True)
class DataParallelMeshDims:
    """FSDP2's class for fully_shard(dp_mesh_dims=...), which zshard does not support."""

    shard: object = None
    replicate: object = None
