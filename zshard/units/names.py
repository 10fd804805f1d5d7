"""Names of parameters and modules without the prefixes that wrappers add.

A checkpoint describes a model, not how it is run. torch.compile(), activation checkpointing and DDP
each wrap a module in another one, which adds a component to its names, though not always in
state_dict(). So saved names omit these components, and loading restores those that
load_state_dict() expects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zshard.units.units import ATTRIBUTE

_COMPILED = "_orig_mod"  # in torch.compile(module)
_PARTS = (_COMPILED, "_checkpoint_wrapped_module")  # load_state_dict() inserts the latter itself


def plain_name(name: str) -> str:
    """Return a name without the components that wrappers add."""
    if not any(part in name for part in _PARTS):
        return name
    return ".".join(part for part in name.split(".") if part not in _PARTS)


def bare(model: nn.Module) -> nn.Module:
    """Return the model that was passed to DDP and torch.compile(). Stops at a unit."""
    while ATTRIBUTE not in vars(model):
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif _COMPILED in model._modules:
            model = model.get_submodule(_COMPILED)
        else:
            break
    return model


def wanted_by(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of plain names under the names that `model`.load_state_dict() expects."""
    wanted = dict(state)
    for path, module in model.named_modules(remove_duplicate=False):  # from outside to inside
        if _COMPILED in module._modules:
            kept = [part for part in path.split(".") if part and part != _PARTS[1]]
            prefix = "".join(f"{part}." for part in kept)
            wanted = {
                f"{prefix}{_COMPILED}.{name[len(prefix) :]}" if name.startswith(prefix) else name: v
                for name, v in wanted.items()
            }
    return wanted
