"""Mixed precision: the dtypes for computing with parameters and for reducing gradients.

The one idea: between steps nothing changes. Parameters, gradients and optimizer state keep the
model's dtype (float32, say); a unit's forward and backward use a cast copy, and gradients are sent
in the reduce dtype and summed in float32.

FSDP1's `MixedPrecision` and FSDP2's `MixedPrecisionPolicy` are accepted, zshard's and torch's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


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


@dataclass(frozen=True)
class Precision:
    """The common form of both."""

    compute: torch.dtype | None = None
    wire: torch.dtype | None = None
    buffers: torch.dtype | None = None
    outputs: torch.dtype | None = None
    cast_inputs: bool = False
    cast_root_inputs: bool = False
    keep: tuple[type[nn.Module], ...] = ()

    def keeps(self, module: nn.Module) -> bool:
        """Return whether the module's own parameters keep their dtype."""
        return isinstance(module, self.keep)


def parse_precision(value: Any) -> Precision:
    """Parse `mixed_precision`; None: nothing is cast.

    Raises TypeError for any other object, ValueError for a dtype that is not floating-point,
    NotImplementedError for keep_low_precision_grads.
    """
    if value is None or isinstance(value, Precision):
        return value or Precision()
    if not hasattr(value, "param_dtype") or not hasattr(value, "reduce_dtype"):
        raise TypeError(
            "mixed_precision must be a MixedPrecision or MixedPrecisionPolicy, zshard's or "
            f"torch's, got {value!r}"
        )
    if getattr(value, "keep_low_precision_grads", False):
        raise NotImplementedError(
            "keep_low_precision_grads=True is not supported: gradients have the parameters' dtype; "
            "omit keep_low_precision_grads"
        )
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"):
        dtype = getattr(value, name, None)
        if dtype is not None and dtype not in _FLOATS:
            known = ", ".join(str(each) for each in _FLOATS)
            raise ValueError(f"{name}={dtype!r} is not supported: expected one of {known}")
    casts = bool(value.cast_forward_inputs)
    keep = getattr(value, "_module_classes_to_ignore", None)
    return Precision(
        compute=value.param_dtype,
        wire=value.reduce_dtype,
        buffers=getattr(value, "buffer_dtype", None),
        outputs=getattr(value, "output_dtype", None),
        cast_inputs=casts,
        cast_root_inputs=casts or bool(getattr(value, "cast_root_forward_inputs", False)),
        keep=(_BatchNorm,) if keep is None else tuple(keep),
    )


def name_of(dtype: torch.dtype | None) -> str | None:
    """Return the name of a dtype: torch.bfloat16 -> "bfloat16"."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def install_casts(
    module: nn.Module, precision: Precision, is_root: bool
) -> list[torch.utils.hooks.RemovableHandle]:
    """Cast the arguments and results of a unit's forward; return the hooks."""
    hooks = []
    inputs = precision.cast_root_inputs if is_root else precision.cast_inputs
    if precision.compute is not None and inputs:
        cast = _CastInputs(precision.compute)
        hooks.append(module.register_forward_pre_hook(cast, prepend=True, with_kwargs=True))
    if precision.outputs is not None:
        hooks.append(module.register_forward_hook(_CastOutputs(precision.outputs)))
    return hooks


def cast_arguments(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments as the forward of a unit's module would get them."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, _CastInputs):
            args, kwargs = hook(module, args, kwargs)
    return args, kwargs


def install_kept(modules: Iterable[nn.Module], precision: Precision) -> None:
    """Cast the arguments of modules that keep their dtype to it."""
    if precision.compute is None:
        return
    for module in modules:
        own = next((p.dtype for p in module.parameters(recurse=False)), None)
        known = any(isinstance(h, _CastInputs) for h in module._forward_pre_hooks.values())
        if own is not None and precision.keeps(module) and not known:
            module.register_forward_pre_hook(_CastInputs(own), with_kwargs=True)
            module.register_forward_hook(_CastOutputs(precision.compute))


def cast_buffers(modules: Iterable[nn.Module], precision: Precision) -> None:
    """Replace the floating-point buffers by cast ones."""
    if precision.buffers is None:
        return
    for module in modules:
        if precision.keeps(module):
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(precision.buffers)


@dataclass(frozen=True)
class _CastInputs:
    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _cast(args, self.dtype), _cast(kwargs, self.dtype)


@dataclass(frozen=True)
class _CastOutputs:
    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _cast(output, self.dtype)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def one(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, one, tree)
