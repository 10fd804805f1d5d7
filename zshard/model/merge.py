"""`merge_and_unload()` and `unload()` of PEFT on a sharded model: a plain base model.

Merging multiplies full matrices, and both replace modules, so they are done to a
plain copy with full parameters. The sharded model stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zshard.guard.whole_values import full_tensor
from zshard.model.copy import copy_plain, without
from zshard.units.units import units_of
from zshard.wrap.quantized import unsettle

_MARK = "get_nb_trainable_parameters"  # of PEFT's models, which pass merging on to a module within
_METHODS = ("merge_and_unload", "unload")


def merges_of(original: type[nn.Module]) -> dict[str, Any]:
    """Return the methods that the FSDP class of `original` has for those of PEFT, by name."""
    return {name: _of_copy(name) for name in _METHODS} if hasattr(original, _MARK) else {}


def _of_copy(name: str) -> Callable[..., Any]:
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Do it to a plain copy with full parameters, and return that one's plain base model.

        Takes memory for the full model on each rank that calls it. Over shm, one rank may call it
        alone; over c10d and on GPUs it is collective. Takes the arguments of PEFT's method.
        """
        return getattr(full_copy(self), name)(*args, **kwargs)

    method.__name__ = name
    return method


def full_copy(model: nn.Module) -> nn.Module:
    """Return a plain copy of a sharded model, with full parameters."""
    units = [(module, state) for module, state in units_of(model)]
    memo: dict[int, Any] = {}
    with without([hook for _, state in units for hook in state.hooks]):
        copied = copy_plain(model, [(module, state.unit) for module, state in units], memo)
    with torch.no_grad():
        for param in model.parameters():
            made = memo[id(param)]
            made.data = full_tensor(param).detach().clone()
            made.requires_grad_(param.requires_grad)
    unsettle(copied.module)
    return copied.module
