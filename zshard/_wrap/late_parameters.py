"""Reject parameters added after wrapping: each rank would train them on its own.

The one idea: nn.Module reports every registered parameter and module to a global hook, and the
modules of sharded models are known; no step searches for anything.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zshard._units.shards import part_of

_members: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_installed = False


def watch(root: nn.Module, ignored: Collection[nn.Module]) -> None:
    """Reject additions to `root` and its descendants, except to `ignored` modules."""
    left_alone = {id(each) for module in ignored for each in module.modules()}
    _members.update(module for module in root.modules() if id(module) not in left_alone)


def install() -> None:
    """Register the global hooks. Idempotent."""
    global _installed
    if not _installed:
        register_module_parameter_registration_hook(_refuse_parameter)
        register_module_module_registration_hook(_refuse_module)
    _installed = True


def _refuse_parameter(module: nn.Module, name: str, param: Any) -> None:
    known = module._parameters.get(name) is not None  # replaced: the next forward tells
    if module in _members and _is_alone(param) and not known:
        raise ValueError(_complaint(module, name, "parameter"))


def _refuse_module(module: nn.Module, name: str, added: Any) -> None:
    if module not in _members or added is None:
        return
    for each in added.modules():
        if each in _members:
            continue
        if any(_is_alone(param) for param in each._parameters.values()):
            raise ValueError(_complaint(module, name, "module with parameters"))


def _is_alone(param: Any) -> bool:
    """Would no unit reduce its gradient?"""
    return param is not None and param.requires_grad and part_of(param) is None


def _complaint(module: nn.Module, name: str, what: str) -> str:
    return (
        f"{what} {name!r} was added to a {type(module).__name__} after FSDP(...), so its gradient "
        "would not be reduced: add it before wrapping the model, or freeze it "
        "(requires_grad_(False))"
    )
