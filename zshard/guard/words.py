"""The text of ShardError: the operation, whose shard it got, and what to write instead.

The remedy depends on the purpose of the operation (a norm, a view, random values), so this file
groups operations by it. The remedy is never to_local(): a refused operation needs all elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zshard.units.shards import Part, asked_for_size

_NORMS = ("norm", "vector_norm", "dist", "cosine_similarity", "normalize", "renorm")
_REDUCTIONS = (
    *("all", "allclose", "amax", "amin", "aminmax", "any", "argmax", "argmin", "bincount"),
    *("count_nonzero", "equal", "histc", "histogram", "histogramdd", "is_nonzero", "item"),
    *("kthvalue", "logsumexp", "max", "mean", "median", "min", "mode", "nanmean", "nanmedian"),
    *("nansum", "numpy", "prod", "quantile", "nanquantile", "std", "std_mean", "sum", "tolist"),
    *("topk", "unique", "var", "var_mean", "array", "bool", "float", "int"),
    *("iter", "contains", "nonzero", "sort"),
)
_LAYERS = (
    *("linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"),
    *("conv_transpose3d", "embedding", "embedding_bag", "layer_norm", "rms_norm", "batch_norm"),
    *("group_norm", "instance_norm", "prelu", "multi_head_attention_forward"),
)
_PRODUCTS = ("matmul", "rmatmul", "mm", "bmm", "mv", "addmm", "baddbmm", "einsum", "tensordot")
_RANDOM = (
    *("bernoulli", "cauchy", "dropout", "exponential", "geometric", "log_normal", "multinomial"),
    *("normal", "random", "uniform", "trunc_normal", "alpha_dropout"),
    *("dirac", "eye", "kaiming_normal", "kaiming_uniform", "orthogonal", "sparse"),
    *("xavier_normal", "xavier_uniform", "no_grad_normal", "no_grad_uniform"),
    "no_grad_trunc_normal",
)

_WHOLE = (
    "Call zshard.full_tensor(t) on all ranks for the whole tensor, or use whole parameters within "
    "FSDP.summon_full_params(model)."
)
_WITHOUT_HISTORY = (
    "For its value, call zshard.full_tensor(t.detach()) on all ranks, or use full parameters "
    "within FSDP.summon_full_params(model)."
)
_IN_A_LOSS = (
    "For a term of the loss, compute it in a forward of the model, or within `with "
    "FSDP.summon_full_params(model):`, or use the optimizer's weight decay."
)
_IN_A_METHOD = (
    "Call the module that has the parameter, block(x) and not block.forward(x). For a method of "
    "yours that uses parameters, call zshard.register_forward_method(model, 'its name') once; "
    "elsewhere, use them within `with FSDP.summon_full_params(model):`."
)
_TRUTHS = (
    "To look at gradients, use the norm that model.clip_grad_norm_() returns, which is NaN or "
    "infinite if any of them is, or zshard.named_norms(model, grads=True)."
)
_IN_AN_OPTIMIZER = (
    "An optimizer that needs full tensors cannot step shards by itself: for Muon use zshard.Muon, "
    "for others zshard.WholeMatrix(optimizer_class, params, ...), an elementwise one "
    '(zshard.AdamW, torch.optim.SGD), or FSDP(..., strategy="no_shard").'
)
_IN_A_BACKWARD = (
    "The backward that runs has not entered the model yet: move the hook or the custom function "
    "into a forward of the model (for a method of yours, call "
    "zshard.register_forward_method(model, 'its name') once), or make the module that has the "
    "parameter part of its parent's unit, by auto_wrap_policy=, and read it there."
)
_OF_TORCH = "If torch's {} called it: zshard has sharded this model already, so remove that call."
_WRAPPERS = {
    torch.chunk: _OF_TORCH.format("fully_shard(), distribute_tensor() or parallelize_module()"),
    torch.flatten: _OF_TORCH.format("FullyShardedDataParallel"),
}
_INITIALIZE = (
    "Initialize within `with FSDP.summon_full_params(model):`, on all ranks with one seed, or by "
    "model.apply(fn), which takes rank 0's values."
)


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
    part, name = parts[0], name_of(func)
    if listed:
        return _misfit(name, parts, args)
    trains = _trains(args)
    only = "" if part.elements.startswith("no ") else "only "
    what = f"{name} was called on a shard: this rank has {only}{part.elements} of '{part.name}'. "
    plain = getattr(func, "__name__", "").strip("_").removeprefix("foreach_")
    if plain == "amp_foreach_non_finite_check_and_unscale":
        return (
            f"{what}A gradient scaler did so that knows no shards, such as torch's "
            "ShardedGradScaler: use zshard.GradScaler, or import ShardedGradScaler from zshard."
        )
    if func in _WRAPPERS:
        what += _WRAPPERS[func] + " "
    elif part.unit is not None and part.unit.is_written:
        what += _IN_AN_OPTIMIZER + " "
    elif torch._C._current_graph_task_id() != -1 and not part.is_in_forward():
        what += _IN_A_BACKWARD + " "
    if plain in _NORMS:
        return (
            f"{what}On all ranks, model.clip_grad_norm_() returns the norm of the gradients, "
            "zshard.named_norms(model) those of each parameter. To normalize a parameter or its "
            "rows, do so within `with FSDP.summon_full_params(model):`, on all ranks."
        )
    if plain in _RANDOM:
        return f"{what}It needs the full tensor. {_INITIALIZE} For noise, use torch.randn_like(t)."
    whole = _WHOLE
    if plain in _LAYERS or (plain in _PRODUCTS and trains):
        return f"{what}{_IN_A_METHOD}"
    if plain in ("all", "any"):
        return f"{what}{_TRUTHS} {_WHOLE}"
    if trains:
        whole = f"{_IN_A_LOSS} {_WITHOUT_HISTORY}"
    if plain in _REDUCTIONS:
        return f"{what}{whole}"
    if plain in ("getitem", "setitem"):
        whole += " Resize layers, as resize_token_embeddings() does, before FSDP(...)."
    return f"{what}Only elementwise operations work on shards. {whole}"


def _trains(args: Sequence[Any]) -> bool:
    """Return whether autograd records the operation, so that its result may be part of a loss."""
    return torch.is_grad_enabled() and any(
        _trains(arg) if isinstance(arg, list | tuple) else getattr(arg, "requires_grad", False)
        for arg in args
    )


def _misfit(name: str, parts: Sequence[Any], args: Sequence[Any]) -> str:
    part = parts[0]
    others = [other for other in parts if other.geometry is not part.geometry]
    ours = f"{name} got a shard of '{part.name}' ({part.elements})"
    whole = f"{_IN_A_LOSS} {_WITHOUT_HISTORY}" if _trains(args) else _WHOLE
    if others:
        other = others[0]
        return (
            f"{ours} and a shard of '{other.name}' ({other.elements}), which are not the same "
            f"elements. {whole}"
        )
    with torch._C.DisableTorchFunctionSubclass():
        given = [v for arg in args for v in (arg if isinstance(arg, list | tuple) else [arg])]
        shapes = [tuple(each.shape) for each in given if isinstance(each, Tensor)]
    if part.is_in_forward():
        return (
            f"{ours} and a full tensor, within a forward, where `p` is the full parameter and "
            "`p.data` this rank's shard of it: use `.data` of all parameters, as in "
            "p.data.mul_(0.9).add_(q.data, alpha=0.1), or of none"
        )
    if part.root in asked_for_size and set(shapes) == {part.local_shape}:
        return (
            f"{ours} and a tensor of this rank's shape, {part.local_shape}, for which the script "
            "has asked. What it holds, such as random numbers, would be the same on each rank, for "
            "other elements. Make it like the parameter: torch.randn_like(p), torch.rand_like(p), "
            "torch.zeros_like(p), p.clone()."
        )
    strange = [shape for shape in shapes if shape != part.local_shape] or shapes
    if tuple(part.shape) in strange:
        return (
            f"{ours} and a tensor of the full shape {tuple(part.shape)}. Make copies of "
            "parameters, such as those of a moving average, after FSDP(...), so that they are "
            f"sharded. {whole}"
        )
    return (
        f"{ours} and a tensor of shape {strange[0] if strange else '?'}: expected a number, or a "
        f"tensor made like the shard (torch.zeros_like(p), p.clone()). {whole}"
    )


def refused_draw(func: Callable[..., Any], part: Part) -> str:
    """Return the message for random numbers whose range may derive from a shard's size."""
    name = func.__name__.removeprefix("_no_grad_")
    return _after_size(f"{name}() got numbers for a shard of '{part.name}'", part)


def refused_index(part: Part) -> str:
    """Return the message for the index of one element, which may derive from a shard's size."""
    return _after_size(f"one element of a shard of '{part.name}' was set by its index", part)


def _after_size(what: str, part: Part) -> str:
    return (
        f"{what}, after the script asked for the shard's size, which is {part.root.local_shape} on "
        "this rank. What is computed from it would be wrong: the full shape is "
        f"{part.root.shape}. {_INITIALIZE} Or ask zshard.shard_info(p)['shape']."
    )


def refused_collective(part: Part) -> str:
    """Return the message for a shard in a collective of torch.distributed."""
    return (
        f"a collective was called on a shard of '{part.name}' ({part.elements}). The ranks' shards "
        "are different elements, so it would mix or overwrite them. Gradients are averaged over "
        "ranks already. For whole tensors, call zshard.full_tensor(t) on all ranks."
    )


def no_history(name: str) -> str:
    """Return the message for a full tensor in a forward, which autograd would treat as a
    constant."""
    return (
        f"the full tensor of '{name}' was asked for within a forward: it has no autograd history, "
        "so the parameter would get no gradient from what is computed with it. Use the parameter "
        "itself, whose unit is gathered then: F.linear(h, model.emb.weight). For its values alone, "
        "use torch.no_grad() or full_tensor(p.detach())."
    )


def refused_grad_dtype(name: str, dtype: object) -> str:
    """Return the message for `p.grad_dtype = dtype`."""
    return (
        f"parameter '{name}' has grad_dtype={dtype}, other than its own dtype, which zshard does "
        "not support: omit it; for gradients in float32, use float32 parameters with "
        "mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)"
    )


def written_to_file(what: str, part: Part) -> str:
    """Return the message for a shard that would be written to a file or sent to another process."""
    return (
        f"{what} was to contain a shard of '{part.name}' ({part.elements}), which is not the full "
        "tensor. Save model.state_dict(), which has full tensors, or call zshard.save(directory, "
        "model, optimizer). For one tensor, save zshard.full_tensor(t), which all ranks call. With "
        "zshard.initialize(), gather within `with zshard.zero.GatheredParameters([p]):`, at all "
        f"stages but 0. For this rank's elements alone, save t.to_local()."
    )
