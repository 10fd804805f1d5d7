"""Reject parameters added after wrapping: each rank would train them on its own.

nn.Module reports every registered parameter and module to a global hook, and the modules of sharded
models are known, so no step searches for anything. A replacement for a sharded module may be
sharded afterwards, so the model's next forward checks it.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zshard.units.shards import part_of

_roots: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]]
_roots = weakref.WeakKeyDictionary()
"""The outermost module of each module of a sharded model."""


def watch(root: nn.Module, ignored: Collection[nn.Module]) -> None:
    """Reject additions to `root` and its descendants, except to `ignored` modules."""
    left_alone = {id(each) for module in ignored for each in module.modules()}
    for module in root.modules():
        if id(module) not in left_alone:
            _roots[module] = weakref.ref(root)


def install() -> None:
    """Register the global hooks."""
    register_module_parameter_registration_hook(_refuse_parameter)
    register_module_module_registration_hook(_refuse_module)


def _refuse_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    is_new = module._parameters.get(name) is None  # of a replaced one, the next forward knows
    if module in _roots and _is_alone(param) and is_new:
        raise ValueError(_complaint(module, name))


def _refuse_module(module: nn.Module, name: str, added: nn.Module | None) -> None:
    if module not in _roots or added is None or not _has_alone(added):
        return
    before, root = module._modules.get(name), _roots[module]()
    if root is None or before is None or not any(map(part_of, before.parameters())):
        raise ValueError(_complaint(module, name))

    def check(_root: nn.Module, _args: object) -> None:  # sharded or removed by now?
        now = module._modules.get(name)
        if now is not None and _has_alone(now):
            raise ValueError(_complaint(module, name))
        handle.remove()

    handle = root.register_forward_pre_hook(check, prepend=True)


def _has_alone(added: nn.Module) -> bool:
    strangers = (each for each in added.modules() if each not in _roots)
    return any(_is_alone(param) for each in strangers for param in each._parameters.values())


def _is_alone(param: nn.Parameter | None) -> bool:
    """Return whether no unit would reduce its gradient."""
    return param is not None and param.requires_grad and part_of(param) is None


def _complaint(module: nn.Module, name: str) -> str:
    return (
        f"{name!r} was added to a {type(module).__name__} after FSDP(...), so its gradient would "
        "not be reduced: add it before FSDP(...), freeze it, or shard it (fully_shard(module)) "
        "where it replaces a sharded module"
    )
