"""The text of ShardError: the operation, whose shard it got, and what to write instead.

The remedy depends on the purpose of the operation (a norm, a view, random values), so this file
groups operations by it. The remedy is never to_local(): a refused operation needs all elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zshard.units.shards import Part

_SUMMON = "within `with FSDP.summon_full_params(model):`, on all ranks"
_FULL = f"For the full tensor, call zshard.full_tensor(t) on all ranks, or use it {_SUMMON}."
_IN_A_LOSS = (
    f"For a term of the loss, compute it in a forward, or {_SUMMON}, or use weight decay. For its "
    "value, call zshard.full_tensor(t.detach()) on all ranks."
)
_INITIALIZE = f"Initialize {_SUMMON}, with one seed, or by model.apply(fn)."
_IN_A_METHOD = (
    "Call the module, block(x) and not block.forward(x); for another method, call "
    f"zshard.register_forward_method(model, 'its name') once; elsewhere, use parameters {_SUMMON}."
)
_IN_AN_OPTIMIZER = (
    "Step full matrices by zshard.Muon or zshard.WholeMatrix(optimizer_class, params, ...); or use "
    'an elementwise one (zshard.AdamW), or FSDP(..., strategy="no_shard").'
)
_IN_A_BACKWARD = (
    "The backward has not entered the model yet: move the hook or the function into a forward of "
    "the model, or choose units by auto_wrap_policy= so that a unit above has the parameter."
)
_NO_WRAPPERS = (
    "If torch's FullyShardedDataParallel, fully_shard(), distribute_tensor() or "
    "parallelize_module() called it, remove that call: zshard has sharded this model."
)
_LAYERS = (
    *("linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"),
    *("conv_transpose3d", "embedding", "embedding_bag", "layer_norm", "rms_norm", "batch_norm"),
    *("group_norm", "instance_norm", "prelu", "multi_head_attention_forward"),
)
_PRODUCTS = ("matmul", "rmatmul", "mm", "bmm", "mv", "addmm", "baddbmm", "einsum", "tensordot")
_REMEDIES = {
    **dict.fromkeys(
        ("norm", "vector_norm", "dist", "cosine_similarity", "normalize", "renorm"),
        "model.clip_grad_norm_() returns the norm of gradients, zshard.named_norms(model) those of "
        f"parameters. Normalize parameters {_SUMMON}.",
    ),
    **dict.fromkeys(
        (
            *("bernoulli", "cauchy", "dropout", "exponential", "geometric", "log_normal"),
            *("multinomial", "normal", "random", "uniform", "trunc_normal", "alpha_dropout"),
            *("dirac", "eye", "kaiming_normal", "kaiming_uniform", "orthogonal", "sparse"),
            *("xavier_normal", "xavier_uniform", "no_grad_normal", "no_grad_uniform"),
            "no_grad_trunc_normal",
        ),
        f"{_INITIALIZE} For noise, use torch.randn_like(t).",
    ),
    **dict.fromkeys(
        ("all", "any"),
        "The norm that model.clip_grad_norm_() returns, and zshard.named_norms(model, grads=True) "
        f"by parameter, is NaN or infinite if a gradient is. {_FULL}",
    ),
    "amp_foreach_non_finite_check_and_unscale": "Use zshard.GradScaler, or import "
    "ShardedGradScaler from zshard: this gradient scaler knows no shards.",
}
"""By an operation's name without underscores; any other needs the full tensor."""

COMPILED = (
    "torch.compile(fullgraph=True) cannot compile operations on shards: omit fullgraph=True, so "
    "that they run uncompiled, or call the function itself"
)


def name_of(func: Callable[..., Any]) -> str:
    """Return a script's name for an operation: "norm()", ".T"."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return "." + str(getattr(getattr(func, "__self__", None), "__name__", "attribute"))
    if name in ("__getitem__", "__setitem__"):
        return "indexing"
    return f"{name}()"


def complaint(
    func: Callable[..., Any], parts: Sequence[Any], args: Sequence[Any], listed: bool
) -> str:
    """Return the message of a refusal.

    parts: Parts of the shards among the arguments. listed: the operation is elementwise, so its
        arguments do not match each other.
    """
    part, name, trains = parts[0], name_of(func), _trains(args)
    remedy = _IN_A_LOSS if trains else _FULL
    if listed:
        return _misfit(name, parts, args, remedy)
    plain = getattr(func, "__name__", "").strip("_").removeprefix("foreach_")
    remedy = _REMEDIES.get(plain, remedy)
    if func in (torch.chunk, torch.flatten):
        remedy = f"{_NO_WRAPPERS} {remedy}"
    elif part.unit is not None and part.unit.is_written:
        remedy = _IN_AN_OPTIMIZER
    elif torch._C._current_graph_task_id() != -1 and not part.is_in_forward():
        remedy = _IN_A_BACKWARD
    elif plain in _LAYERS or (plain in _PRODUCTS and trains):
        remedy = _IN_A_METHOD
    elif plain in ("getitem", "setitem"):
        remedy += " Resize layers before FSDP(...)."
    only = "" if part.elements.startswith("no ") else "only "
    shard = f"{name} was called on a shard: this rank has {only}{part.elements} of '{part.name}'."
    return f"{shard} {remedy}"


def _trains(args: Sequence[Any]) -> bool:
    """Return whether autograd records the operation, so that its result may be part of a loss."""
    return torch.is_grad_enabled() and any(
        _trains(arg) if isinstance(arg, list | tuple) else getattr(arg, "requires_grad", False)
        for arg in args
    )


def _misfit(name: str, parts: Sequence[Any], args: Sequence[Any], remedy: str) -> str:
    part = parts[0]
    shard = f"{name} got a shard of '{part.name}' ({part.elements})"
    other = next((each for each in parts if each.geometry is not part.geometry), None)
    if other is not None:
        return f"{shard} and a shard of '{other.name}' ({other.elements}): other elements. {remedy}"
    with torch._C.DisableTorchFunctionSubclass():
        values = [v for arg in args for v in (arg if isinstance(arg, list | tuple) else [arg])]
        shapes = [tuple(each.shape) for each in values if isinstance(each, Tensor)]
    if part.is_in_forward():
        return (
            f"{shard} and a full tensor, within a forward, where `p` is full and `p.data` this "
            "rank's shard: use `.data` of all parameters, or of none"
        )
    if part.is_size_read and set(shapes) == {part.local_shape}:
        return (
            f"{shard} and a tensor of this rank's shape, {part.local_shape}, whose values would be "
            "those of other elements on each rank: make it by torch.randn_like(p), p.clone()"
        )
    misfits = [shape for shape in shapes if shape != part.local_shape] or shapes or [()]
    if tuple(part.shape) in misfits:
        return (
            f"{shard} and a tensor of the full shape {tuple(part.shape)}. Copy parameters "
            f"after FSDP(...), so that they are sharded. {remedy}"
        )
    return (
        f"{shard} and a tensor of shape {misfits[0]}: expected a number, or a tensor made like the "
        f"shard (torch.zeros_like(p), p.clone()). {remedy}"
    )


def after_size(what: str, part: Part) -> str:
    """Return the message for numbers or an index that may derive from a shard's size."""
    return (
        f"{what} a shard of '{part.name}', after the script asked for the shard's size, "
        f"{part.root.local_shape} on this rank: compute it from the full shape, {part.root.shape}, "
        f"of zshard.shard_info(p)['shape']. {_INITIALIZE}"
    )


def refused_grad_dtype(name: str, dtype: object) -> str:
    """Return the message for `p.grad_dtype = dtype`."""
    return (
        f"parameter '{name}' has grad_dtype={dtype}, which is not supported: omit it, or use "
        "float32 parameters with MixedPrecision(param_dtype=torch.bfloat16)"
    )


def written_to_file(what: str, part: Part) -> str:
    """Return the message for a shard that would be written to a file or sent to another process."""
    return (
        f"{what} was to contain a shard of '{part.name}' ({part.elements}). Save "
        "model.state_dict(), or zshard.full_tensor(t), called on all ranks, or call zshard.save(). "
        "With zshard.initialize(), gather within `with zshard.zero.GatheredParameters([p]):`. For "
        "this rank's elements alone, save t.to_local()."
    )
