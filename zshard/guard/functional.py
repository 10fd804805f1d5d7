"""torch.func on sharded models: functional_call(), and transforms such as grad() and vmap().

functional_call() lends other tensors to a model for the time of a call, so units do
not take them for parameters that a script has put in place of theirs. A transform hides a tensor's
class, and with it the guard, so a shard is refused where it enters one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._functorch import eager_transforms, vmap
from torch.nn.utils import stateless

from zshard import _core
from zshard.guard.slices import ShardParameter, ShardTensor

__all__ = ["install"]

_SHARDS = (ShardParameter, ShardTensor)


def install() -> None:
    """Have torch's functional calls and transforms know of shards. Idempotent."""
    if hasattr(stateless._reparametrize_module, "_zshard_lends"):
        return
    stateless._reparametrize_module = _lending(stateless._reparametrize_module)  # type: ignore[assignment]
    vmap._add_batch_dim = _refusing(vmap._add_batch_dim, "torch.func.vmap")  # type: ignore[attr-defined]
    eager_transforms._wrap_tensor_for_grad = _refusing(
        eager_transforms._wrap_tensor_for_grad, "torch.func.grad"
    )


def _lending(
    reparametrize: Callable[..., AbstractContextManager[None]],
) -> Callable[..., AbstractContextManager[None]]:
    @functools.wraps(reparametrize)
    def lending(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        swapped = reparametrize(*args, **kwargs)
        return swapped if torch.compiler.is_compiling() else lent(swapped)

    @contextlib.contextmanager
    def lent(swapped: AbstractContextManager[None]) -> Iterator[None]:
        with swapped:
            _core.lend_parameters(1)
            try:
                yield
            finally:
                _core.lend_parameters(-1)

    lending._zshard_lends = True  # type: ignore[attr-defined]
    return lending


def _refusing(enter: Callable[..., Any], name: str) -> Callable[..., Any]:
    """What wraps a tensor for a transform. Within a forward, a parameter is full for it."""

    @functools.wraps(enter)
    def entered(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if type(tensor) in _SHARDS:
            return _core.guarded(transform, (), (tensor, *args), kwargs)
        return enter(tensor, *args, **kwargs)

    @functools.wraps(enter)
    def transform(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return enter(tensor, *args, **kwargs)

    transform.__name__ = name
    return entered
