"""The classes of arguments that scripts for FSDP1 and FSDP2 make, under torch's names.

They only carry values, so they stand on nothing. What the values mean is said where
they are translated: `fsdp1.py` and `fsdp2.py`, which take torch's own objects as well.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass(frozen=True)
class MixedPrecision:
    """FSDP1's mixed precision: FSDP(model, mixed_precision=MixedPrecision(torch.bfloat16)).

    Parameters, `.grad` and optimizer state keep the model's dtype. All dtypes are floating-point.

    Args:
        param_dtype: dtype of parameters in forward and backward. None: the model's.
        reduce_dtype: dtype in which gradients are sent; they are summed in float32. None:
            param_dtype.
        buffer_dtype: dtype to which floating-point buffers are cast on wrapping. None: the model's.
        keep_low_precision_grads: must be False (NotImplementedError).
        cast_forward_inputs: cast floating-point arguments of each unit's forward to param_dtype.
        cast_root_forward_inputs: the same for the root unit only.
        _module_classes_to_ignore: modules of these classes keep the dtype of their parameters and
            buffers; their arguments are cast to it, their results to param_dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: tuple[type[nn.Module], ...] = (_BatchNorm,)


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """FSDP2's mixed precision: fully_shard(module, mp_policy=MixedPrecisionPolicy(...)).

    Args:
        param_dtype, reduce_dtype, cast_forward_inputs: as in MixedPrecision.
        output_dtype: dtype to which floating-point results of each unit's forward are cast. None:
            no cast.
        param_dtype_override_fn: called with each parameter when it is sharded; returns the dtype
            that it has in forward and backward, its own or param_dtype. None: param_dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True
    )


@dataclass
class OffloadPolicy:
    """FSDP2's policy for no offloading: parameters stay on their device."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """FSDP2's policy for offloading parameters, gradients and optimizer state to host memory.

    pin_memory: accepted for compatibility; no effect. On CPU ranks the policy has no effect.
    """

    pin_memory: bool = True


# --- enums ----------------------------------------------------------------------------------------


class TorchEnum(enum.Enum):
    """An enum that torch has as well: its members equal torch's of the same name.

    A script may compare what zshard returns with either. torch's are not imported for it: what has
    the name of the class and of the member is the same.
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

    FULL_STATE_DICT: full tensors. SHARDED_STATE_DICT and LOCAL_STATE_DICT, equivalent here: this
    rank's shards.
    """

    FULL_STATE_DICT = enum.auto()
    LOCAL_STATE_DICT = enum.auto()
    SHARDED_STATE_DICT = enum.auto()


# --- FSDP1's configs ------------------------------------------------------------------------------


@dataclass
class CPUOffload:
    """FSDP1's FSDP(cpu_offload=CPUOffload(offload_params=True)): parameters and gradients stay in
    host memory. No effect on CPU ranks."""

    offload_params: bool = False


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
    """For SHARDED_STATE_DICT. _use_dtensor: shards are plain tensors either way."""

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

    state_dict_type: Any
    state_dict_config: Any
    optim_state_dict_config: Any


# --- names that scripts import --------------------------------------------------------------------


class FlatParameter(nn.Parameter):
    """FSDP1's class for isinstance(p, FlatParameter), which no parameter in zshard is."""

    def __new__(cls, *args: Any, **kwargs: Any) -> FlatParameter:
        raise TypeError(
            "FlatParameter cannot be constructed: zshard keeps the original parameters, each "
            "with this rank's shard"
        )


@dataclass(frozen=True)
class DataParallelMeshDims:
    """FSDP2's class for fully_shard(dp_mesh_dims=...), which zshard does not support."""

    shard: Any = None
    replicate: Any = None
