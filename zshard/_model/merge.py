"""`merge_and_unload()` of PEFT on a sharded model: a plain model with the adapters merged.

The one idea: merging multiplies full matrices and replaces modules, so it is done to a plain copy
with full parameters. The sharded model stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zshard._guard.whole_values import full_tensor
from zshard._model.copy import copy_plain, without
from zshard._units.units import units_of

_MARK = "get_nb_trainable_parameters"  # of PEFT's models, which pass merging on to a module within
_METHOD = "merge_and_unload"


def merges_of(original: type[nn.Module]) -> dict[str, Any]:
    """Return {"merge_and_unload": the method that the FSDP class of `original` has}, or {}."""
    return {_METHOD: _merge_and_unload} if hasattr(original, _MARK) else {}


def _merge_and_unload(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return the plain base model, on each rank that calls it, with the adapters merged into it.

    Takes memory for the full model. Over shm, one rank may call it alone; over c10d and on GPUs it
    is collective. Takes the arguments of PEFT's method.
    """
    return getattr(full_copy(self), _METHOD)(*args, **kwargs)


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
    return copied.module
