"""What FSDP() takes besides options: the module, its initialization, what is left alone; checks.

Nothing is ignored silently. A value that asks for something zshard does not support
is an error that names the argument, raised before ranks communicate.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zshard.units.units import is_unit

Ignored = tuple[set[nn.Module], set[nn.Parameter]]


def check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"FSDP expects an nn.Module, got {type(module).__name__}")
    if is_unit(module):
        raise ValueError(
            f"this {type(module).__name__} is already wrapped: call FSDP once per module "
            "(inner modules first when wrapping by hand)"
        )
    devices: dict[torch.device, str] = {}
    for name, param in module.named_parameters():
        if not param.is_meta:  # it is materialized later
            devices.setdefault(param.device, name)
    if len(devices) > 1:
        places = ", ".join(f"'{name}' on {device}" for device, name in devices.items())
        raise ValueError(f"all parameters must be on one device, got {places}")


def check_init(param_init_fn: Any) -> None:
    """Raise TypeError if `param_init_fn` cannot be called."""
    if param_init_fn is not None and not callable(param_init_fn):
        raise TypeError(
            f"param_init_fn must be a callable that takes a module, got {param_init_fn!r}"
        )


def check_buffer_sync(forward_sync_buffers: Any) -> None:
    """Raise ValueError if `forward_sync_buffers` is none of its values."""
    if forward_sync_buffers not in (False, True, "training"):
        raise ValueError(
            f"forward_sync_buffers must be True, False or 'training', got {forward_sync_buffers!r}"
        )


def split_ignored(
    modules: Iterable[nn.Module] | None,
    states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
) -> Ignored:
    ignored_modules, ignored_params = set(modules or ()), set()
    for item in states or ():
        if isinstance(item, nn.Module):
            ignored_modules.add(item)
        elif isinstance(item, nn.Parameter):
            ignored_params.add(item)
        else:
            raise TypeError(f"ignored_states must contain modules or parameters, got {item!r}")
    for module in ignored_modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"ignored_modules must contain modules, got {module!r}")
    return ignored_modules, ignored_params
