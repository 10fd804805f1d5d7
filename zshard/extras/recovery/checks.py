"""What zshard.Keep() refuses to keep."""

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
        raise NotImplementedError(
            f"a kept run needs one of zshard's elementwise optimizers (AdamW, Adam, SGD, or these "
            f"with 8-bit state), got {type(optimizer).__module__}.{type(optimizer).__name__}"
        )
    state = state_of(model)
    if state.comms.all.world == 1:
        raise NotImplementedError("a kept run needs two ranks or more, got one")
    names_of(optimizer)
    own = {id(param) for _, param in named_shards(model)}
    for param in params_of(optimizer):
        part = part_of(param)
        if id(param) not in own and part is not None:
            raise ValueError(
                f"the optimizer steps '{part.name}', which is not in the model that Keep() was "
                "given: keep one module that contains all models of the optimizer"
            )
    if is_stepped_in_backward(model):
        raise NotImplementedError(
            "optimizer_in_backward() steps before all gradients are there, so a kept run cannot "
            "finish its step: call remove() on the handle"
        )
    if any(param.device.type != "cpu" for param in model.parameters()):
        raise NotImplementedError("a kept run needs parameters in host memory, got some on a GPU")
    if any(each.options.offload for _, each in units_of(model)):
        raise NotImplementedError("a kept run cannot be offloaded to a disk: omit offload")


def check_others(others: Sequence[Any]) -> None:
    """Refuse what would not be restored together with the model."""
    modules = [other for other in others if isinstance(other, nn.Module)]
    restored = {id(param) for module in modules for param in module.parameters()}
    for other in others:
        name = type(other).__name__
        if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
            raise TypeError(
                f"Keep() got a {name}, which has no state_dict(): pass it in the dict of commit()"
            )
        if isinstance(other, nn.Module) and any(True for _ in units_of(other)):
            raise NotImplementedError(
                f"Keep() keeps one FSDP(...) model, but got a second one, a {name}: keep one "
                "module that contains both, and step it with one optimizer"
            )
        if isinstance(other, Optimizer) and any(map(part_of, params_of(other))):
            raise NotImplementedError(
                f"Keep() keeps one optimizer of sharded parameters, but got a second one, {name}: "
                "give all parameters to one optimizer, in param groups"
            )
        if isinstance(other, Optimizer) and {*map(id, params_of(other))} - restored:
            raise ValueError(
                f"Keep() got {name} without the module that it steps, whose parameters would be "
                "lost: pass that module, too"
            )
