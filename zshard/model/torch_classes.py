"""The argument classes of FSDP1 and FSDP2 scripts, under torch's names.

They only carry values. FSDP() recognizes them by their names and fields, so it takes torch's own
objects as well.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import nn

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


# --- enums ----------------------------------------------------------------------------------------


class TorchEnum(enum.Enum):
    """An enum that torch has as well: its members equal torch's of the same name.

    A script may compare what zshard returns with either enum. Names of the class and the member
    decide, so torch's enum need not be imported.
    """

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, enum.Enum):
            return NotImplemented
        return type(other).__name__ == type(self).__name__ and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)  # as enum.Enum's


class BackwardPrefetch(TorchEnum):
    """FSDP1's enum for FSDP(backward_prefetch=...)."""

    BACKWARD_PRE = enum.auto()
    BACKWARD_POST = enum.auto()


class StateDictType(TorchEnum):
    """FSDP1's enum for FSDP.state_dict_type() and FSDP.set_state_dict_type().

    All are equivalent here: full tensors.
    """

    FULL_STATE_DICT = enum.auto()
    LOCAL_STATE_DICT = enum.auto()
    SHARDED_STATE_DICT = enum.auto()


# --- FSDP1's configs ------------------------------------------------------------------------------


@dataclass
class StateDictConfig:
    """Base of the configs for state_dict().

    offload_to_cpu: accepted for compatibility; no effect.
    """

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """For FULL_STATE_DICT. rank0_only: other ranks get an empty dict."""

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """For LOCAL_STATE_DICT."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """For SHARDED_STATE_DICT; the dict is full. _use_dtensor: tensors are plain either way."""

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """Base of the configs for FSDP.optim_state_dict(), which returns tensors on the CPU."""

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """For FULL_STATE_DICT. rank0_only: other ranks get an empty dict."""

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """For LOCAL_STATE_DICT; the dict is full."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """For SHARDED_STATE_DICT; the dict is full. _use_dtensor: tensors are plain either way."""

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """What FSDP.get_state_dict_type() and FSDP.set_state_dict_type() return: the type and the
    configs in effect, as a script passed them."""

    state_dict_type: object
    state_dict_config: object
    optim_state_dict_config: object


# --- names that scripts import --------------------------------------------------------------------


class FlatParameter(nn.Parameter):
    """FSDP1's class for isinstance(p, FlatParameter), which no parameter in zshard is."""

    def __new__(cls, *args: object, **kwargs: object) -> FlatParameter:
        raise TypeError("FlatParameter cannot be constructed: zshard keeps the original parameters")


@dataclass(frozen=True)
class DataParallelMeshDims:
    """FSDP2's class for fully_shard(dp_mesh_dims=...), which zshard does not support."""

    shard: object = None
    replicate: object = None
