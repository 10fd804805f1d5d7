"""FSDP's arguments: parsing and validation.

The one idea: nothing is ignored silently. A value that asks for something zshard does not support
is an error that names the argument, raised before ranks communicate.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zshard._units.units import Prefetch, is_unit
from zshard.strategy import ShardingStrategy, parse_strategy

Ignored = tuple[set[nn.Module], set[nn.Parameter]]


def check_fixed_arguments(use_orig_params: bool) -> None:
    """Raise NotImplementedError for a value that zshard does not support."""
    if not use_orig_params:
        raise NotImplementedError(
            "use_orig_params=False is not supported: zshard always keeps the original parameters; "
            "omit use_orig_params"
        )


def parse_prefetch(
    backward_prefetch: Any, forward_prefetch: Any, limit_all_gathers: Any
) -> Prefetch:
    """Parse FSDP1's three prefetch arguments. Raises ValueError for an unknown value."""
    name = backward_prefetch
    if isinstance(name, enum.Enum):
        name = name.name
    if isinstance(name, str):
        name = name.lower()
    if name not in (None, "backward_pre", "backward_post"):
        raise ValueError(
            "backward_prefetch must be 'backward_pre', 'backward_post' or None, got "
            f"{backward_prefetch!r}"
        )
    units = 1 if limit_all_gathers else 2
    return Prefetch(
        forward=units if forward_prefetch else 0,
        backward=units if name == "backward_pre" else 0,
    )


def choose_strategy(sharding_strategy: Any, strategy: Any) -> ShardingStrategy:
    if sharding_strategy is not None and strategy is not None:
        raise ValueError("pass either sharding_strategy or strategy (its short name), not both")
    given = strategy if strategy is not None else sharding_strategy
    return ShardingStrategy.FULL_SHARD if given is None else parse_strategy(given)


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


def split_ignored(
    modules: Iterable[nn.Module] | None,
    states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
) -> tuple[set[nn.Module], set[nn.Parameter]]:
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


def one_device(device_id: Any, device_ids: Any) -> Any:
    """Return what `device_id` and DDP's spelling of it say. Raises ValueError if both are given, or
    the second is not one device."""
    if device_ids is None:
        return device_id
    if device_id is not None:
        raise ValueError("pass either device_id or device_ids, not both")
    if not isinstance(device_ids, list | tuple) or len(device_ids) != 1:
        raise ValueError(
            f"device_ids={device_ids!r}: expected a list of one GPU, that of this rank"
        )
    return device_ids[0]
