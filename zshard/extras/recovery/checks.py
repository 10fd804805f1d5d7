"""Checks for models and optimizers that zshard.Keep() refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zshard.api import (
    InOneCall,
    is_stepped_in_backward,
    is_unit,
    params_of,
    part_of,
    state_of,
    units_of,
)
from zshard.extras.recovery.layout import named_shards, names_of


def check(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise TypeError, NotImplementedError or ValueError for what cannot be kept."""
    if not is_unit(model):
        raise TypeError(f"Keep() expects an FSDP(...) model, got {type(model).__name__}")
    if not isinstance(optimizer, InOneCall):
        kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        raise NotImplementedError(
            f"a kept run needs AdamW, Adam or SGD of zshard, also with 8-bit state, got {kind}"
        )
    names, shards = names_of(optimizer), {id(shard) for _, shard in named_shards(model)}
    if absent := [name for param, name in names.items() if param not in shards]:
        text = f"the optimizer steps '{absent[0]}', which is not in the model that Keep() was given"
        raise ValueError(f"{text}: keep one module that contains all models")
    for is_refused, words in (
        (state_of(model).comms.all.world == 1, "needs two ranks or more, got one"),
        (is_stepped_in_backward(model), "excludes optimizer_in_backward(): remove() its handle"),
        (any(p.device.type != "cpu" for p in model.parameters()), "needs parameters on the CPU"),
        (any(s.options.offload for _, s in units_of(model)), "cannot be on a disk: omit offload"),
    ):
        if is_refused:
            raise NotImplementedError(f"a kept run {words}")


def check_others(others: Sequence[Any]) -> None:
    """Refuse what would not be restored together with the model."""
    modules = [other for other in others if isinstance(other, nn.Module)]
    restored = {id(param) for module in modules for param in module.parameters()}
    for other in others:
        name = type(other).__name__
        if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
            raise TypeError(f"Keep() got a {name}, which has no state_dict(): pass it to commit()")
        if isinstance(other, nn.Module) and any(True for _ in units_of(other)):
            text = f"Keep() keeps one FSDP(...) model, but got a second one, {name}"
            raise NotImplementedError(f"{text}: keep one module that contains both")
        params = [*params_of(other)] if isinstance(other, Optimizer) else []
        if any(map(part_of, params)):
            text = f"Keep() keeps one optimizer of shards, but got a second one, {name}"
            raise NotImplementedError(f"{text}: give all parameters to one")
        if {*map(id, params)} - restored:
            raise ValueError(
                f"Keep() got {name} without the module that it steps: pass that module as well"
            )
