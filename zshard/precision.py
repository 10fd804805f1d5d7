"""Mixed precision: the dtypes for computing with parameters and for reducing gradients.

Between steps, parameters, gradients and optimizer state keep the model's dtype (float32, say). A
unit's forward and backward use a cast copy; gradients are sent in the reduce dtype, and the ranks'
are summed in float32. Sums over micro-batches have the model's dtype.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from zshard._errors import check_choice

BATCH_NORMS = (_BatchNorm,)  # keep their dtype by default
_REDUCES_IN_OWN = torch.__version__ >= "2.15"  # FSDP2 without a reduce_dtype
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class MixedPrecision:
    """Mixed precision: FSDP(model, mixed_precision=MixedPrecision(torch.bfloat16)), as in FSDP1.

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
        param_dtype, cast_forward_inputs: as in MixedPrecision.
        reduce_dtype: dtype in which gradients are sent; they are summed in float32. None: what it
            is in the installed torch's FSDP2: since 2.15 the dtype of the parameters (of several
            dtypes in a unit, the one that they promote to), before that param_dtype.
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


@dataclass(frozen=True)
class Precision:
    """The dtypes in which a unit computes, sends gradients and keeps its buffers; None: the
    model's.

    compute: parameters in forward and backward. wire: gradients on their way to other ranks; None:
    `compute`, or with `wire_of_params` the dtype that the unit's parameters promote to. buffers:
    floating-point buffers. outputs: floating-point results of the forward. cast_inputs,
    cast_root_inputs: cast arguments of a unit's forward to `compute`; of the root's. keep: modules
    of these classes keep their dtype. override: returns the dtype of a parameter in forward and
    backward: its own, or `compute`, which None also means.
    """

    compute: torch.dtype | None = None
    wire: torch.dtype | None = None
    wire_of_params: bool = False
    buffers: torch.dtype | None = None
    outputs: torch.dtype | None = None
    cast_inputs: bool = False
    cast_root_inputs: bool = False
    keep: tuple[type[nn.Module], ...] = ()
    override: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, repr=False)

    def keeps_param(self, param: nn.Parameter) -> bool:
        """Return whether `override` makes the parameter keep its dtype. Raises ValueError if it
        returns an unsupported dtype."""
        dtype = None if self.override is None else self.override(param)
        if dtype not in (None, self.compute, param.dtype):
            raise ValueError(
                f"param_dtype_override_fn returned {dtype!r} for a parameter of {param.dtype}: "
                f"return its dtype, param_dtype ({self.compute}) or None"
            )
        return dtype == param.dtype and dtype != self.compute

    def wire_for(self, params: Iterable[nn.Parameter]) -> torch.dtype | None:
        """Return the dtype in which gradients of a unit's parameters are sent; None: `compute`."""
        if not self.wire_of_params or self.compute is None:
            return self.wire
        dtypes = [each.dtype for each in params if each.is_floating_point()]
        return functools.reduce(torch.promote_types, dtypes) if dtypes else None

    def keeps(self, module: nn.Module) -> bool:
        """Return whether the module's own parameters keep their dtype."""
        return isinstance(module, self.keep)


def precision_of(policy: object) -> Precision:
    """Translate a MixedPrecision or a MixedPrecisionPolicy, zshard's or torch's. None: no casts.

    Raises TypeError for any other object, ValueError for a dtype that is not floating-point,
    NotImplementedError for keep_low_precision_grads.
    """
    if policy is None:
        return Precision()
    if not hasattr(policy, "param_dtype") or not hasattr(policy, "reduce_dtype"):
        raise TypeError(
            "mixed_precision must be a MixedPrecision(param_dtype=torch.bfloat16) or "
            f"MixedPrecisionPolicy, got {policy!r}"
        )
    if getattr(policy, "keep_low_precision_grads", False):
        raise NotImplementedError("keep_low_precision_grads=True is not supported: omit it")
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"):
        check_choice(name, getattr(policy, name, None), (None, *_FLOATS))
    is_policy = hasattr(policy, "output_dtype")  # FSDP2's, not FSDP1's
    casts = bool(getattr(policy, "cast_forward_inputs", False))
    keep = getattr(policy, "_module_classes_to_ignore", None)
    return Precision(
        compute=policy.param_dtype,
        wire=policy.reduce_dtype,
        wire_of_params=policy.reduce_dtype is None and _REDUCES_IN_OWN and is_policy,
        buffers=getattr(policy, "buffer_dtype", None),
        outputs=getattr(policy, "output_dtype", None),
        cast_inputs=casts,
        cast_root_inputs=casts or bool(getattr(policy, "cast_root_forward_inputs", False)),
        keep=BATCH_NORMS if keep is None else tuple(keep),
        override=getattr(policy, "param_dtype_override_fn", None),
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


def drop_root_casts(module: nn.Module, precision: Precision) -> set[int]:
    """Undo the part of install_casts() that only roots get, as `module` has become an inner unit.
    Return the ids of the hooks."""
    if precision.cast_inputs:
        return set()
    cast = _CastInputs(precision.compute) if precision.compute is not None else None
    dropped = {key for key, hook in module._forward_pre_hooks.items() if hook == cast}
    for key in dropped:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)
    return dropped


def cast_arguments(module: nn.Module, args: object, kwargs: object) -> tuple[Any, Any]:
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
        dtype = next((p.dtype for p in module.parameters(recurse=False)), None)
        casts = any(isinstance(h, _CastInputs) for h in module._forward_pre_hooks.values())
        if dtype is not None and precision.keeps(module) and not casts:
            module.register_forward_pre_hook(_CastInputs(dtype), with_kwargs=True)
            module.register_forward_hook(_CastOutputs(precision.compute))


def cast_buffers(module: nn.Module, precision: Precision, ignored: Collection[nn.Module]) -> None:
    """Replace the floating-point buffers by cast ones; state dicts keep their original dtypes.
    ignored: modules whose buffers, and those below, stay as they are."""
    if precision.buffers is None:
        return
    left = {each for one in ignored for each in one.modules()}
    cast: dict[Tensor, Tensor] = {}  # buffers that modules share stay shared
    for _, each in module.named_modules():
        if precision.keeps(each) or each in left:
            continue
        before: dict[str, torch.dtype] = {}
        for name, buffer in each._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                before[name] = buffer.dtype
                if buffer not in cast:
                    cast[buffer] = buffer.to(precision.buffers)
                each._buffers[name] = cast[buffer]
        if before:
            each.register_state_dict_post_hook(_SaveBuffers(before, precision.buffers))


@dataclass(eq=False)  # torch registers it
class _SaveBuffers:
    """A state dict hook that saves a module's buffers in their original dtypes."""

    before: dict[str, torch.dtype]
    low: torch.dtype

    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: object
    ) -> None:
        for name, dtype in self.before.items():
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and value.dtype == self.low:
                state[prefix + name] = value.to(dtype)


@dataclass(frozen=True)
class _CastInputs:
    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: object, kwargs: object) -> Any:
        return _cast(args, self.dtype), _cast(kwargs, self.dtype)


@dataclass(frozen=True)
class _CastOutputs:
    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: object, output: object) -> Any:
        return _cast(output, self.dtype)


def _cast(tree: object, dtype: torch.dtype) -> Any:
    def one(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(one, tree)


def map_tensors(change: Callable[[Tensor], Tensor], tree: object) -> Any:
    """Return arguments or results of a forward with changed tensors, also inside lists, tuples,
    sets, dicts, dataclasses and their subclasses. A container without changed tensors stays the
    same object; any other one is copied."""
    return _map(change, tree, {})


def _map(change: Callable[[Tensor], Tensor], tree: object, results: dict[int, Any]) -> Any:
    """results: of containers, by id; a container that contains itself maps to itself."""
    if isinstance(tree, Tensor):
        return change(tree)
    is_data = is_dataclass(tree) and not isinstance(tree, type | nn.Module)
    if not is_data and not isinstance(tree, dict | list | tuple | set | frozenset):
        return tree
    if id(tree) not in results:
        results[id(tree)] = tree
        results[id(tree)] = _map_container(change, tree, results)
    return results[id(tree)]


def _map_container(change: Callable[[Tensor], Tensor], tree: Any, results: dict[int, Any]) -> Any:
    if isinstance(tree, list | tuple | set | frozenset):
        old = list(tree)
        new = [_map(change, value, results) for value in old]
        if all(map(operator.is_, old, new)):
            return tree
        return type(tree)(*new) if hasattr(tree, "_fields") else type(tree)(new)
    is_dict = isinstance(tree, dict)  # transformers' outputs are dicts and dataclasses
    of_fields = () if is_dict else ((f.name, getattr(tree, f.name, None)) for f in fields(tree))
    result = tree
    for key, value in list(tree.items() if is_dict else of_fields):
        changed = _map(change, value, results)
        if changed is value:
            continue
        result = copy.copy(tree) if result is tree else result
        if is_dict:
            result[key] = changed
        else:
            object.__setattr__(result, key, changed)  # works for frozen ones as well
    return result
