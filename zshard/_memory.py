"""A model's memory: held now, at most, and predicted; of a wrapped model, and of one that is not.

The one idea: the C core counts and predicts (csrc/unit/reserve.c); what is added here is the
state of the optimizers that have stepped the model's parameters, which is the optimizers' own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zshard import _core
from zshard._device import CPU
from zshard._model_outline import Outline, World, outline_comms
from zshard._optim_guard import seen_optimizers
from zshard._plan import UnitSpec
from zshard._units import Options, Prefetch, State, state_of, units_of
from zshard.offload import offload_on, parse_offload
from zshard.precision import Precision, parse_precision
from zshard.strategy import ShardingStrategy, parse_strategy
from zshard.wrap import plan_units

WHATS = ("now", "peak", "predicted")
STATE_TENSORS = {"adam": 2, "adamw": 2, "sgd": 0, "rmsprop": 1, "adagrad": 1}
"""Tensors of a parameter's size that optimizers keep, by their class's name."""


def memory_of(module: nn.Module, what: str) -> dict[str, int]:
    """See FSDP.memory."""
    if what not in WHATS:
        known = ", ".join(repr(each) for each in WHATS)
        raise ValueError(f"memory(what={what!r}): there are {known}")
    state = state_of(module)
    states = [each for _, each in units_of(module)]
    held = _optimizer_bytes(states)
    state.optimizer_peak = max(state.optimizer_peak, held)
    engine = state.unit.engine
    if what == "now":
        return with_optimizer(engine.memory(), held)
    if what == "peak":
        return with_optimizer(engine.peak(), state.optimizer_peak)
    in_memory, elsewhere = (2 * _trained_bytes(states, where) for where in (False, True))
    return with_optimizer(engine.predict(False), held or in_memory, elsewhere)


def with_optimizer(parts: dict[str, int], optimizer: int, elsewhere: int = 0) -> dict[str, int]:
    """The parts with that of the optimizer, and their total at the end. elsewhere: bytes of its
    state that is offloaded, which the parts do not know of."""
    total = parts.pop("total") + optimizer
    offloaded = parts["offloaded"] + elsewhere
    return {**parts, "offloaded": offloaded, "optimizer": optimizer, "total": total}


def _optimizer_bytes(states: Iterable[State]) -> int:
    """Bytes of the state that optimizers seen so far have of these units' parameters."""
    params = [
        param for state in states for param in state.unit.params if not _core.offloads_state(param)
    ]
    total = 0
    for optimizer in seen_optimizers():
        for param in params:
            for value in optimizer.state.get(param, {}).values():
                if isinstance(value, torch.Tensor):
                    total += value.numel() * value.itemsize
    return total


def _trained_bytes(states: Iterable[State], offloaded: bool) -> int:
    """Bytes of this rank's part of the parameters that get gradients, and whose optimizer state is
    offloaded, or is not."""
    return sum(
        state.unit.param(i)["numel"] * param.itemsize
        for state in states
        for i, param in enumerate(state.unit.params)
        if param.requires_grad and state.unit.offloads[2] is offloaded
    )


def predict_memory(
    module: nn.Module,
    world_size: int,
    *,
    strategy: Any = "full_shard",
    auto_wrap_policy: Any = "auto",
    mixed_precision: Any = None,
    transport: str = "auto",
    optimizer: str | int | None = "adamw",
    local_world_size: int | None = None,
    offload: Any = None,
) -> dict[str, int]:
    """What a rank will take for `module`, wrapped by FSDP with these arguments: bytes by part, as
    `memory("predicted")` gives them, on rank 0, of which no other has much more.

    The module is not changed, may be on the meta device, and no process group is needed.

    world_size: number of ranks. local_world_size: of them on one host, all if None; a hybrid
        strategy shards over these.
    transport: "shm", "c10d" or "auto": shm where all ranks are on one host.
    optimizer: "adamw", "adam", "sgd", "rmsprop" or "adagrad", or the number of tensors of a
        parameter's size that it keeps; None: none.
    offload: as for FSDP; what goes to a disk is the part "offloaded", and in no total. (The
        directory may be any: nothing is made there.)

    Activations, and what torch itself takes, are not in it. In a world of one gradients are
    torch's own as well. Raises ValueError or TypeError for what FSDP would refuse, and for unknown
    names.
    """
    tensors = _state_tensors(optimizer)
    options = Options(
        parse_strategy(strategy),
        parse_precision(mixed_precision),
        Prefetch(),
        offload_on(parse_offload(offload), CPU),
    )
    world = _world(world_size, local_world_size, transport)
    specs = plan_units(module, auto_wrap_policy)
    made = outline_of(module, [(spec, options_of(spec, options)) for spec in specs], world)
    in_memory, elsewhere = (tensors * made.trained_bytes(where) for where in (False, True))
    return with_optimizer(made.predict(), in_memory, elsewhere)


def outline_of(module: nn.Module, planned: list[tuple[UnitSpec, Options]], world: World) -> Outline:
    """The outline of `module` in a world without peers; the strategy is that of the root."""
    return Outline(module, planned, outline_comms(world, planned[-1][1].strategy))


def options_of(spec: UnitSpec, usual: Options) -> Options:
    """What a CustomPolicy has overridden for this unit, and the rest as for the model. ValueError
    for what is not a unit's to choose."""
    strategy: ShardingStrategy = usual.strategy
    precision: Precision = usual.precision
    given = spec.overrides.get("sharding_strategy", spec.overrides.get("strategy"))
    if given is not None:
        strategy = parse_strategy(given)
    if strategy is not usual.strategy and (strategy.is_hybrid or strategy.keeps):
        raise ValueError(
            f"unit '{spec.name}' asks for the strategy {strategy.value!r}, the model for "
            f"{usual.strategy.value!r}: strategies with groups or copies of their own are for "
            "whole models"
        )
    given = spec.overrides.get("mixed_precision")
    if given is not None:
        precision = parse_precision(given)
    return usual._replace(strategy=strategy, precision=precision)


def _state_tensors(optimizer: str | int | None) -> int:
    if optimizer is None:
        return 0
    if isinstance(optimizer, int) and not isinstance(optimizer, bool) and optimizer >= 0:
        return optimizer
    name = optimizer.lower() if isinstance(optimizer, str) else None
    if name not in STATE_TENSORS:
        known = ", ".join(repr(each) for each in STATE_TENSORS)
        raise ValueError(
            f"optimizer={optimizer!r}: there are {known}; else give the number of tensors that it "
            "keeps for a parameter"
        )
    return STATE_TENSORS[name]


def _world(size: int, local: int | None, transport: str) -> World:
    local = size if local is None else local
    for name, value in (("world_size", size), ("local_world_size", local)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r} is no number of ranks")
    if local < size and size % local != 0:
        raise ValueError(f"{size} ranks do not divide into hosts of {local}")
    if transport not in ("auto", "shm", "c10d"):
        raise ValueError(f"unknown transport {transport!r}; there are 'auto', 'shm' and 'c10d'")
    on_one_host = local >= size
    if transport == "shm" and not on_one_host:
        raise ValueError(f"transport='shm' is for one host; {size} ranks are on several of {local}")
    inside = "c10d" if transport == "c10d" else "shm"
    return World(size, min(local, size), inside if on_one_host else "c10d", inside)
