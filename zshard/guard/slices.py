"""Guarded shards: a sharded parameter, and the results of elementwise operations on it.

Between steps a parameter is a shard of shape (k, 1, ..., 1). Code that took it for the full matrix
would silently compute something else, so its class is a subclass whose operations torch dispatches
to zshard. Elementwise operations run, and their results are guarded in turn (py_guard.c with the
list of guard/rules.py). All others raise ShardError, which names the remedy. In forward and
backward parameters are unsharded, and their class (WholeParameter) does not intercept operations.

Operations never communicate, except full_tensor(), which is collective.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zshard import _core
from zshard._errors import ShardError
from zshard.guard.plain import (
    GuardedTensor,
    Operation,
    grads_of,
    guard_like,
    guarded,
    is_tracing,
    plain,
    run_plain,
    slices_among,
    to_local,
)
from zshard.guard.rules import EACH, NONE, WRITES, kind_of, rules
from zshard.guard.whole_values import full_tensor
from zshard.guard.words import COMPILED, complaint, written_to_file
from zshard.units.shards import Part, part_of

__all__ = [
    "RULES",
    "Operation",
    "ShardError",
    "ShardParameter",
    "ShardTensor",
    "WholeParameter",
    "grads_of",
    "guard_like",
    "guarded",
    "has_memory_of",
    "plain",
    "refuse",
    "run_plain",
    "slices_among",
    "to_local",
]

RULES = rules()


class _Guarded(GuardedTensor):
    """The methods of guarded tensors."""

    def to_local(self) -> Tensor:
        """Return this rank's elements as a plain tensor, which shares memory with this one and is
        not guarded. Does not communicate."""
        return to_local(self)

    def full_tensor(self) -> Tensor:
        """Return the full tensor, of the parameter's shape, as a new plain tensor.

        Collective: call it on all ranks. Raises what zshard.full_tensor() does."""
        return full_tensor(self)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        part = _core.slice_part(self)
        with plain():
            if part is None:  # a parameter while it is unsharded
                return f"{type(self).__name__}({to_local(self)!r})"
            return f"{type(self).__name__}({to_local(self)!r}, {part.elements} of {part.name!r})"

    def __format__(self, spec: str) -> str:
        return object.__format__(repr(self), spec) if not spec else format(repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        part = _core.slice_part(self)
        with plain():
            copied = _own_copy(self)
        memo[id(self)] = copied
        for key, value in vars(self).items() if type(self) is ShardTensor else ():  # as torch does
            if key != "_zshard_part":
                setattr(copied, key, copy.deepcopy(value, memo))
        return copied if part is None else _guard_copy(copied, part)

    def __copy__(self) -> Any:
        part = _core.slice_part(self)
        with plain():
            copied = _as_torchs(self)
        return copied if part is None else _guard_copy(copied, part)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Raise ShardError: pickling, as in torch.save(), needs the full tensor."""
        part = _core.slice_part(self)
        if part is not None:
            raise ShardError(written_to_file("a pickle (torch.save())", part))
        with plain():  # a parameter while it is unsharded: as torch's own class
            return _as_torchs(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():  # the compiler then runs the function uncompiled
            raise ShardError(COMPILED)
        return _core.guarded(func, types, args, kwargs)


class ShardTensor(_Guarded):
    """This rank's elements of a tensor of a sharded parameter's shape, such as its gradient.

    Elementwise operations work and return another ShardTensor. All others raise ShardError: they
    would see this rank's elements only. `shape` and `numel()` are those of this rank's elements.
    """

    _zshard_part: object


class ShardParameter(_Guarded, nn.Parameter):
    """A sharded parameter between steps: see ShardTensor."""

    _zshard_part: object = None  # set on a copy; _parts has those of a model


class WholeParameter(nn.Parameter):
    """A sharded parameter while its unit is unsharded. It differs from nn.Parameter in `data`,
    because writes there leave no trace: once a script has read it, zshard checks for changes. It
    also differs in `grad`, which is this rank's shard."""

    @property
    def data(self) -> Tensor:
        """The full parameter, outside of autograd."""
        part = part_of(self)
        if part is not None:
            part.watch_data()
        full: Tensor = _data.__get__(self)
        return full

    @data.setter
    def data(self, value: Tensor) -> None:
        _data.__set__(self, value)

    @property
    def grad(self) -> Tensor | None:
        """The gradient: between passes this rank's shard, guarded; within
        summon_full_params(with_grads=True) the full one. None for torch's compiler, which
        copies each parameter with its .grad and refuses one of another shape."""
        if is_tracing():
            return None
        grad: Tensor | None = _grad.__get__(self)
        part = part_of(self)
        state = None if part is None else part.state
        if grad is not None:
            _core.apply_pending(grad, False)
        if grad is None or part is None or (state is not None and state.whole_grads):
            return grad
        return _core.mark_slice(grad, part)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _grad.__delete__(self)

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As torch's, but setting the parameter's current memory is not a write: torch's
        parametrize sets a parameter to itself."""
        return self if has_memory_of(self, source) else super().set_(source, *args, **kwargs)

    __deepcopy__ = _Guarded.__deepcopy__
    __reduce_ex__ = _Guarded.__reduce_ex__


_data: Any = Tensor.data
_grad: Any = Tensor.grad


def _own_copy(tensor: Tensor) -> Tensor:
    """Return a copy of torch's own class."""
    values = tensor.detach().clone(memory_format=torch.preserve_format)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(values, tensor.requires_grad)
    return values.requires_grad_(tensor.requires_grad)


def _guard_copy(copied: Tensor, part: object) -> Tensor:
    copied._zshard_part = part  # type: ignore[attr-defined]
    copied.__class__ = ShardParameter if isinstance(copied, nn.Parameter) else ShardTensor
    return copied


def _as_torchs(tensor: Tensor) -> Tensor:
    """Return the same elements in torch's own class, with a script's attributes."""
    plain_tensor = tensor.detach()
    if isinstance(tensor, nn.Parameter):
        plain_tensor = nn.Parameter(plain_tensor, tensor.requires_grad)
    else:
        plain_tensor.requires_grad_(tensor.requires_grad)
    attributes = {key: value for key, value in vars(tensor).items() if key != "_zshard_part"}
    vars(plain_tensor).update(attributes)
    return plain_tensor


def has_memory_of(tensor: Tensor, source: object) -> bool:
    """Return whether `tensor.set_(source)` would change nothing."""
    if not isinstance(source, Tensor) or source.dtype != tensor.dtype:
        return False
    with plain():
        return tensor.is_set_to(source)


def refuse(func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Raise ShardError. Runs the operation if no argument is a shard right now."""
    parts = slices_among((*args, *kwargs.values()))
    if not parts:  # parameters that are unsharded right now
        return run_plain(func, args, kwargs)
    fitting = _fitting(func, parts[0], args)
    if fitting is not None:
        return func(*fitting, **kwargs)
    reads = parts[0].is_in_forward() and not _core.names_a_write(func)
    if reads and any(_param_at(value) is not None for value in (*args, *kwargs.values())):
        full = {key: _full_of(value) for key, value in kwargs.items()}
        return func(*map(_full_of, args), **full)
    is_listed = kind_of(RULES.get(func, NONE)) != NONE
    raise ShardError(complaint(func, parts, args, is_listed))


def _fitting(func: Operation, part: Part, args: tuple[Any, ...]) -> list[Any] | None:
    """Return the arguments of a write to a shard within a forward, where other operations have made
    full tensors; those are cut to this rank's elements. None if they do not fit."""
    if RULES.get(func, NONE) != EACH | WRITES or _core.slice_part(args[0]) is not part:
        return None
    if part.shape == part.local_shape or not part.is_in_forward():
        return None
    full = [
        isinstance(arg, Tensor) and _core.slice_part(arg) is None and arg.shape == part.shape
        for arg in args
    ]
    if not any(full):
        return None
    own = zip(args, full, strict=True)
    return [_core.mark_slice(part.of(arg), part) if is_full else arg for arg, is_full in own]


def _param_at(value: Any) -> Tensor | None:
    """Return the parameter whose own memory this is, as from `.data` and detach(), or None."""
    part: Part | None = _core.slice_part(value) if type(value) is ShardTensor else None
    if part is None or part.root is not part:
        return None
    unit = part.unit
    is_its_memory = unit is not None and unit.is_slice(part.index, value)
    return unit.params[part.index] if unit is not None and is_its_memory else None


def _full_of(value: object) -> Any:
    """Return the full parameter's memory within a forward, given the parameter's own."""
    param = _param_at(value)
    if param is None:
        return value
    with torch.no_grad():
        return param.view_as(param)
