"""The classes of arguments that scripts for FSDP1 and FSDP2 make, under torch's names.

The one idea: they only carry values, so they stand on nothing. What the values mean is said where
they are translated: `fsdp1.py` and `fsdp2.py`, which take torch's own objects as well.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass
class OffloadPolicy:
    """FSDP2's policy for no offloading: parameters stay on their device."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """FSDP2's policy for offloading parameters, gradients and optimizer state to host memory.

    pin_memory: accepted for compatibility; no effect. On CPU ranks the policy has no effect.
    """

    pin_memory: bool = True
