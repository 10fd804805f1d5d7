"""`generate()` of transformers on a sharded model, with other lengths on each rank.

Transformers can have all ranks go on until the last has its tokens (`synced_gpus`),
which it does for models that torch has sharded. Here it is needed where a forward takes all ranks,
and only there: over shm each rank generates by itself. The argument is passed, and nothing is
marked: by the mark that transformers looks for, torch.compile takes a model for one of torch's own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from zshard.units.units import state_of, units_of

ARGUMENT = "synced_gpus"


def generate_of(original: type[nn.Module]) -> dict[str, Any]:
    """Return {"generate": the method that its FSDP class has instead}, or {} if it needs none."""
    method = inspect.getattr_static(original, "generate", None)
    if not inspect.isfunction(method) or not _passes_on(method):
        return {}
    generate: Callable[..., Any] = method

    @functools.wraps(generate)
    def synced(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if needs_all(self) and _takes(self, generate) and not _is_given(generate, args, kwargs):
            kwargs[ARGUMENT] = True
        return generate(self, *args, **kwargs)

    return {"generate": synced}


def needs_all(module: nn.Module) -> bool:
    """Return whether a forward of this unit's model takes all ranks of the job."""
    state = state_of(module)
    comms = state.comms
    if comms.all.world == 1 or comms.all.world != dist.get_world_size():
        return False  # transformers asks all ranks of the job whether they are done
    gathers = comms.shard_group.world > 1 and comms.shard_group.transport != "shm"
    sharded = any(not each.unit.replicated for _, each in units_of(module))
    return state.sync_buffers is True or (sharded and (gathers or comms.replica_group is not None))


def _parameters(method: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(method).parameters)


def _passes_on(method: Callable[..., Any]) -> bool:
    kinds = {each.kind for each in _parameters(method).values()}
    return ARGUMENT in _parameters(method) or inspect.Parameter.VAR_KEYWORD in kinds


def _takes(module: nn.Module, method: Callable[..., Any]) -> bool:
    """Does `method` have the argument, or that of a module within, to which it passes them on?"""
    if ARGUMENT in _parameters(method):
        return True
    inner = (
        getattr(type(each), "generate", None) for each in module.modules() if each is not module
    )
    return any(callable(each) and ARGUMENT in _parameters(each) for each in inner)


def _is_given(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if kwargs.get(ARGUMENT) is not None:
        return True
    names = list(_parameters(method))[1:]  # without self
    at = names.index(ARGUMENT) if ARGUMENT in names else len(args)
    return at < len(args)
