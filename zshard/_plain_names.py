"""Names of parameters and modules as the model has them that nobody has wrapped.

The one idea: a checkpoint is of a model, not of how it is run. torch.compile(), activation
checkpointing and DDP each put a module around another one, whose names then have a part more, in
some places: state_dict() has it or has it not. So names that are kept are without these parts, and
loading puts back those that load_state_dict() wants.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zshard._units import ATTRIBUTE

_COMPILED = "_orig_mod"  # within torch.compile(module)
_PARTS = (_COMPILED, "_checkpoint_wrapped_module")  # the latter load_state_dict() puts in by itself


def plain(name: str) -> str:
    """A name without the parts that are of wrappers."""
    if not any(part in name for part in _PARTS):
        return name
    return ".".join(part for part in name.split(".") if part not in _PARTS)


def bare(model: nn.Module) -> nn.Module:
    """The model that DDP and torch.compile() were given; what is a unit itself is none of them."""
    while ATTRIBUTE not in vars(model):
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif _COMPILED in model._modules:
            model = model.get_submodule(_COMPILED)
        else:
            break
    return model


def wanted_by(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict of plain names with those that load_state_dict() of `model` wants."""
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
