"""Methods of transformers and PEFT that count parameters count full ones on a sharded model.

They add up the sizes of what named_parameters() yields. While one of them runs, it
yields parameters of full shape, without memory.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from zshard import _core
from zshard.units.units import without_memory

__all__ = ["count_in_parts", "counts_of", "full_named_parameters", "num_parameters"]

_METHODS = ("num_parameters", "get_nb_trainable_parameters")
_MARK = "_zshard_counts_full"
_PASSES_ON = "get_nb_trainable_parameters"  # PEFT's models have it, and pass on what they lack


def counts_of(original: type[nn.Module]) -> dict[str, Any]:
    """Return the counting methods that the FSDP class of `original` has instead of its own."""
    found = {name: inspect.getattr_static(original, name, None) for name in _METHODS}
    counts: dict[str, Any] = {
        name: _of_full(each) for name, each in found.items() if inspect.isfunction(each)
    }
    if found["num_parameters"] is None and hasattr(original, _PASSES_ON):
        counts["num_parameters"] = property(_passed_on)
    return counts


def count_in_parts(model: nn.Module) -> None:
    """Have these methods count full parameters on the parts of a model, which keep their classes,
    too: as ever where nothing is sharded."""
    for cls in {type(part) for part in model.modules()}:
        for name in _METHODS:
            owner = next((each for each in cls.__mro__ if name in vars(each)), None)
            method = None if owner is None else vars(owner)[name]
            if owner is not None and inspect.isfunction(method) and not hasattr(method, _MARK):
                setattr(owner, name, _of_full(method))


def _of_full(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if "named_parameters" in vars(self):
            return method(self, *args, **kwargs)
        vars(self)["named_parameters"] = functools.partial(full_named_parameters, self)
        try:
            return method(self, *args, **kwargs)
        finally:
            del vars(self)["named_parameters"]

    setattr(counted, _MARK, True)
    return counted


def _passed_on(self: nn.Module) -> Callable[..., Any]:
    """num_parameters() of the model within a PEFT model; AttributeError if that has none."""
    method: Any = self.__getattr__("num_parameters")
    return functools.partial(_of_full(method.__func__), method.__self__)


def num_parameters(model: nn.Module, trainable_only: bool = False) -> int:
    """Return the number of elements of a model's full parameters, the same on all ranks. Does not
    communicate.

    Args:
        model: a model, or a part of one, sharded or not. Tied parameters count once.
        trainable_only: count parameters that require a gradient only. Default: False.
    """
    found = (param for _, param in full_named_parameters(model))
    return sum(p.numel() for p in found if p.requires_grad or not trainable_only)


def full_named_parameters(
    module: nn.Module, *args: Any, **kwargs: Any
) -> Iterator[tuple[str, nn.Parameter]]:
    """As named_parameters(), with full shapes and without memory."""
    for name, param in type(module).named_parameters(module, *args, **kwargs):
        info = _core.shard_info(param)
        yield name, param if info is None else without_memory(param, info["shape"], param.device)
