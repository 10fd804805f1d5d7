"""Names of FSDP2 that a script still takes from torch: what they would do silently, and what they
lack.

Torch's FSDPModule cannot know zshard's modules, so isinstance() is False and a script
leaves out what it does for them, without a word. And plain tensors have none of DTensor's names;
the AttributeError says what to write. Nothing of torch answers otherwise than before.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch

from zshard._errors import stacklevel

__all__ = ["install", "warn_of_torchs_names"]

_REMEDIES = {
    "full_tensor": (
        "zshard has no DTensors, and its state dicts contain full tensors already: leave out "
        ".full_tensor(); zshard.full_tensor(p) returns the whole of a parameter or gradient, and "
        "zshard.save(directory, model, optimizer) writes each rank's shards"
    ),
    "device_mesh": (
        "zshard has no DTensors: load full tensors with model.load_state_dict(), or from one rank "
        "with zshard.load_state_dict(); zshard.shard_info(p) describes a shard"
    ),
}
_REMEDIES["placements"] = _REMEDIES["device_mesh"]


class _NoSuchAttribute:
    """An attribute that is not there, with a message of its own: hasattr() stays False."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:  # torch.overrides lists what the class has, and skips what is None
            return None
        raise AttributeError(
            f"'{owner.__name__}' object has no attribute '{self.name}': {_REMEDIES[self.name]}"
        )


def install() -> None:
    """Have tensors say what to write in place of DTensor's names. Idempotent."""
    for name in _REMEDIES:
        if name not in vars(torch.Tensor):
            setattr(torch.Tensor, name, _NoSuchAttribute(name))


_NAMES = ("FSDPModule", "register_fsdp_forward_method")
_FROM = "torch.distributed.fsdp._fully_shard._fully_shard"
# These ask torch's class about models of their own making, or have an adapter of zshard's.
_KNOWN = frozenset({"torch", "accelerate", "transformers", "peft", "trl", "lightning"})
_warned = {"__mp_main__"}  # another name of __main__


def warn_of_torchs_names() -> None:
    """Warn of each module of the script that has imported torch's FSDPModule, once."""
    torchs = sys.modules.get(_FROM)
    if torchs is None:
        return
    theirs = [(name, getattr(torchs, name, None)) for name in _NAMES]
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in _KNOWN or module_name in _warned:
            continue
        names = vars(module) if hasattr(module, "__dict__") else {}
        found = [name for name, value in theirs if value is not None and names.get(name) is value]
        if found:
            _warned.add(module_name)
            warnings.warn(
                f"module {module_name!r} has {' and '.join(found)} of torch, which does not know "
                "modules that zshard shards (isinstance() is False, and a method is not "
                "registered), so what the script does for them is silently left out: import "
                f"{' and '.join(found)} from zshard",
                UserWarning,
                stacklevel=stacklevel(),
            )
