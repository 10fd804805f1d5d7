"""The torch operations whose result on shards is the shard of the result on full tensors.

The list names what is allowed; any other operation is refused. So an operation that a later torch
adds is an error until it has been reviewed. tests/guard/test_guard_ops.py compares each with the
full tensor and finds those that do not belong on the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional, init

FACT, EACH, LISTS, GRAD, NONE = range(5)
"""Actions of csrc/python/py_guard.c on an operation: run it and return its result as it is; run it
on slices of the same elements and guard the result; the same for lists of tensors; get `.grad`; ask
Python."""

WRITES = 8
"""Flag: writes to its first argument, so every rank must run it."""

STAYS = 16
"""Flag: reads no elements, so within a forward it does not have the unit gathered."""

STAYS_ALONE = 32
"""Flag: like STAYS, but only while autograd is off."""

RAW = 64
"""Flag: a script can write through its result unseen."""

_FACTS = (
    *("data_ptr", "dense_dim", "dim", "dim_order", "element_size", "get_device"),
    *("is_complex", "is_coalesced", "is_conj", "is_contiguous", "is_floating_point"),
    *("is_inference", "is_neg", "is_pinned", "is_same_size", "is_set_to", "is_shared"),
    *("is_signed", "ndimension", "qscheme", "sparse_dim"),
    *("storage_offset", "storage_type", "stride", "untyped_storage", "record_stream"),
    *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad"),
    *("__dir__", "__hash__", "__sizeof__", "__setstate__", "is_distributed"),
    *("has_names", "_is_view", "_typed_storage"),
)
_FACT_ATTRIBUTES = (
    *("ndim", "dtype", "device", "layout", "itemsize", "nbytes", "requires_grad"),
    *("is_leaf", "retains_grad", "output_nr", "grad_fn", "grad_dtype", "name", "names"),
    *("is_cpu", "is_cuda", "is_ipu", "is_maia", "is_meta", "is_mkldnn", "is_mps", "is_mtia"),
    *("is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_vulkan", "is_xla", "is_xpu"),
    *("_version", "_base", "_cdata", "_backward_hooks", "_post_accumulate_grad_hooks"),
    *("_grad_fn", "volatile"),
)
_SETTERS = ("data", "grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")

_UNARY = (
    *("abs", "absolute", "acos", "acosh", "angle", "arccos", "arccosh", "arcsin", "arcsinh"),
    *("arctan", "arctanh", "asin", "asinh", "atan", "atanh", "bitwise_not", "ceil", "conj"),
    *("conj_physical", "cos", "cosh", "deg2rad", "digamma", "erf", "erfc", "erfinv", "exp"),
    *("exp2", "expm1", "fix", "floor", "frac", "i0", "isfinite", "isinf", "isnan", "isneginf"),
    *("isposinf", "isreal", "lgamma", "log", "log10", "log1p", "log2", "logical_not", "logit"),
    *("nan_to_num", "neg", "negative", "positive", "rad2deg", "reciprocal", "relu"),
    *("resolve_conj", "resolve_neg", "round", "rsqrt", "sgn", "sigmoid", "sign", "signbit"),
    *("sin", "sinc", "sinh", "sqrt", "square", "tan", "tanh", "trunc", "hardshrink"),
)
_BINARY = (
    *("add", "arctan2", "atan2", "bitwise_and", "bitwise_left_shift", "bitwise_or"),
    *("bitwise_right_shift", "bitwise_xor", "clamp", "clamp_max", "clamp_min", "clip"),
    *("copysign", "div", "divide", "eq", "float_power", "floor_divide", "fmax", "fmin", "fmod"),
    *("gcd", "ge", "greater", "greater_equal", "gt", "heaviside", "hypot", "igamma", "igammac"),
    *("isclose", "lcm", "ldexp", "le", "less", "less_equal", "logaddexp", "logaddexp2"),
    *("logical_and", "logical_or", "logical_xor", "lt", "maximum", "minimum", "mul", "multiply"),
    *("ne", "nextafter", "not_equal", "pow", "remainder", "rsub", "sub", "subtract"),
    *("true_divide", "xlogy"),
)
_TERNARY = ("addcdiv", "addcmul", "lerp", "masked_fill", "where")
_COPIES = (
    *("bfloat16", "bool", "byte", "cdouble", "cfloat", "chalf", "char", "clone", "contiguous"),
    *("copy_", "cpu", "cuda", "detach", "detach_", "double", "expand_as", "fill", "fill_", "float"),
    *("half", "int", "long", "pin_memory", "short", "to", "type_as", "view_as", "xpu", "zero_"),
    *("empty_like", "full_like", "ones_like", "zeros_like"),
)
_DUNDERS = (
    *("abs", "add", "and", "div", "eq", "floordiv", "ge", "gt", "iadd", "iand", "idiv"),
    *("ifloordiv", "ilshift", "imod", "imul", "invert", "ior", "ipow", "irshift", "isub"),
    *("itruediv", "ixor", "le", "lshift", "lt", "mod", "mul", "ne", "neg", "or", "pos", "pow"),
    *("radd", "rand", "rdiv", "rfloordiv", "rlshift", "rmod", "rmul", "ror", "rpow", "rrshift"),
    *("rshift", "rsub", "rtruediv", "rxor", "sub", "truediv", "xor"),
)
_INPLACE_DUNDERS = frozenset(name for name in _DUNDERS if name[0] == "i" and name != "invert")
_FUNCTIONAL = (
    *("celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu"),
    *("logsigmoid", "mish", "relu", "relu6", "selu", "sigmoid", "silu", "softplus", "softshrink"),
    *("softsign", "tanh", "tanhshrink", "threshold"),
)
_INIT = ("constant_", "zeros_", "ones_")

_NOT_EACH_OF_LISTS = ("_foreach_norm", "_foreach_max", "_foreach_mm", "_foreach_powsum")
_FUSED = ("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_")

LIKE_AT_RANDOM = frozenset((torch.rand_like, torch.randn_like, torch.randint_like))
"""Random *_like functions; on a shard they return its part of the full draw."""

NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")
"""new_* methods. A result with the shard's shape is treated as a shard."""

DRAWN_IN_PLACE = (
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_"),
    *("random_", "uniform_"),
)
"""In-place random fills; a shard gets its part of the full draw."""

SIZES = ("size", "numel", "nelement", "__len__")
"""Methods that return sizes, in addition to the attribute `shape`."""

VIEWS = ("__getitem__", "narrow", "select", "chunk", "split")
"""View methods; on a shard they return this rank's part of a contiguous view."""

Operation = Callable[..., Any]


def rules() -> dict[Operation, int]:
    """Return the rule for each operation that is allowed."""
    table: dict[Operation, int] = {
        **dict.fromkeys(_facts(), FACT),
        **dict.fromkeys(_each(), EACH),
        **dict.fromkeys(_lists(), LISTS),
        _getter("grad"): GRAD,
        **dict.fromkeys(_special(), NONE | STAYS),
    }
    for detach in (Tensor.detach, torch.detach):
        table[detach] |= STAYS_ALONE
    for name in ("data_ptr", "untyped_storage", "_typed_storage"):
        table[getattr(Tensor, name)] |= RAW
    return {func: rule | WRITES if _writes(func, rule) else rule for func, rule in table.items()}


def kind_of(rule: int) -> int:
    """Return FACT, EACH, LISTS, GRAD or NONE, without the flags."""
    return rule & 7


def _writes(func: Operation, rule: int) -> bool:
    """Return whether an operation works in place, by torch's naming convention."""
    name = func.__name__
    if func == Tensor.data.__set__:  # type: ignore[attr-defined]
        return True
    if rule not in (EACH, LISTS) or name == "detach_":
        return False
    if name.startswith("__"):
        return name.strip("_") in _INPLACE_DUNDERS
    return name.endswith("_")


def _special() -> Iterator[Operation]:
    """Yield the operations that Python handles without the elements, or uses to write."""
    yield from _named(Tensor, (*SIZES, *NEW, *DRAWN_IN_PLACE, "type"))
    yield from (_getter(name) for name in ("shape", "data"))
    yield from (torch.autograd.grad, torch.autograd.backward)


def _facts() -> Iterator[Operation]:
    yield from _named(Tensor, _FACTS)
    yield from _named(torch, _FACTS)
    yield from (_getter(name) for name in _FACT_ATTRIBUTES if hasattr(Tensor, name))
    yield from (getattr(Tensor, name).__set__ for name in _SETTERS)
    yield from (getattr(Tensor, name).__delete__ for name in ("data", "grad"))
    yield from (torch.result_type, torch.can_cast, torch._has_compatible_shallow_copy_type)


def _each() -> Iterator[Operation]:
    names = (*_UNARY, *_BINARY, *_TERNARY)
    for home in (Tensor, torch):
        yield from _named(home, (*names, *_COPIES))
        yield from _named(home, [f"{name}_" for name in names])
    yield from _named(Tensor, [f"__{name}__" for name in _DUNDERS])
    yield from _named(functional, _FUNCTIONAL)
    yield from _named(functional, [f"{name}_" for name in _FUNCTIONAL])
    yield from _named(init, _INIT)
    yield torch.polygamma
    yield Tensor.polygamma


def _lists() -> Iterator[Operation]:
    names = [name for name in dir(torch) if name.startswith("_foreach_")]
    yield from _named(torch, [name for name in names if name not in _NOT_EACH_OF_LISTS])
    yield from _named(torch, _FUSED)


def _named(home: object, names: Iterable[str]) -> Iterator[Operation]:
    """Return those operations that this torch has."""
    return (getattr(home, name) for name in names if callable(getattr(home, name, None)))


def _getter(name: str) -> Operation:
    getter: Operation = getattr(Tensor, name).__get__
    return getter
