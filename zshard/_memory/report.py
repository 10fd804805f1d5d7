"""A model's memory: current, peak and predicted, of a wrapped model or before wrapping it.

The one idea: the C core counts and predicts (csrc/engine/reserve.c); this file adds the state of
the optimizers that have stepped the model's parameters, which belongs to the optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zshard import _core
from zshard._memory.dry_run import DryRun, World, dry_comms
from zshard._optim.hooks import seen_optimizers
from zshard._ranks.devices import CPU
from zshard._units.units import Options, Prefetch, State, state_of, units_of
from zshard._wrap.tree import UnitSpec
from zshard.offload import offload_on, parse_offload
from zshard.precision import Precision, parse_precision
from zshard.strategy import ShardingStrategy, parse_strategy
from zshard.wrap import plan_units

WHATS = ("now", "peak", "predicted")
STATE_TENSORS = {"adam": 2, "adamw": 2, "sgd": 0, "rmsprop": 1, "adagrad": 1}
"""Number of parameter-sized state tensors per parameter, by optimizer class."""


def memory_of(module: nn.Module, what: str) -> dict[str, int]:
    """See FSDP.memory."""
    if what not in WHATS:
        known = ", ".join(repr(each) for each in WHATS)
        raise ValueError(f"memory(): what must be one of {known}, got {what!r}")
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
    """Return the parts with the optimizer's bytes added, and their total last.

    elsewhere: bytes of optimizer state that is offloaded, to be added to that part.
    """
    total = parts.pop("total") + optimizer
    offloaded = parts["offloaded"] + elsewhere
    return {**parts, "offloaded": offloaded, "optimizer": optimizer, "total": total}


def _optimizer_bytes(states: Iterable[State]) -> int:
    """Return the bytes of state that the optimizers seen so far keep for these units."""
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
    """Return the bytes of this rank's shards of the trainable parameters whose optimizer state is,
    or is not, offloaded."""
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
    """Predict the memory that FSDP with these arguments takes on rank 0, in bytes by part.

    Other ranks take about the same. The module is not changed and may be on the meta device; no
    process group is needed.

    Args:
        module: the model, not yet wrapped.
        world_size: number of ranks.
        strategy, auto_wrap_policy, mixed_precision: as for FSDP.
        transport: "shm", "c10d" or "auto" (shm if all ranks are on one host).
        optimizer: "adamw", "adam", "sgd", "rmsprop" or "adagrad"; or the number of parameter-sized
            state tensors that it keeps per parameter; None for no optimizer.
        local_world_size: ranks per host, over which a hybrid strategy shards. None: all.
        offload: as for FSDP. Bytes on disk are reported as "offloaded" and not included in
            "total". The directory need not exist.

    Returns a dict like that of `model.memory("predicted")`, which ends with "total". Activations
    and torch's own memory are not included; with world size 1, gradients are torch's own as well.

    Raises ValueError or TypeError for arguments that FSDP would reject, and for unknown names.
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
    made = dry_run_of(module, [(spec, options_of(spec, options)) for spec in specs], world)
    in_memory, elsewhere = (tensors * made.trained_bytes(where) for where in (False, True))
    return with_optimizer(made.predict(), in_memory, elsewhere)


def dry_run_of(module: nn.Module, planned: list[tuple[UnitSpec, Options]], world: World) -> DryRun:
    """Return a dry run of `module` in a world without peers, with the root's strategy."""
    return DryRun(module, planned, dry_comms(world, planned[-1][1].strategy))


def options_of(spec: UnitSpec, usual: Options) -> Options:
    """Return the model's options with a CustomPolicy's overrides for this unit. Raises ValueError
    for an override that only applies to a whole model."""
    strategy: ShardingStrategy = usual.strategy
    precision: Precision = usual.precision
    given = spec.overrides.get("sharding_strategy", spec.overrides.get("strategy"))
    if given is not None:
        strategy = parse_strategy(given)
    if strategy is not usual.strategy and (strategy.is_hybrid or strategy.keeps):
        raise ValueError(
            f"unit '{spec.name}' requests strategy {strategy.value!r}, but the model has "
            f"{usual.strategy.value!r}: hybrid strategies and zero1 apply to whole models; set "
            "them on the outermost FSDP(...)"
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
            f"unknown optimizer {optimizer!r}: expected one of {known}, or the number of state "
            "tensors that it keeps per parameter"
        )
    return STATE_TENSORS[name]


def _world(size: int, local: int | None, transport: str) -> World:
    local = size if local is None else local
    for name, value in (("world_size", size), ("local_world_size", local)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if local < size and size % local != 0:
        raise ValueError(f"world_size={size} is not a multiple of local_world_size={local}")
    if transport not in ("auto", "shm", "c10d"):
        raise ValueError(f"unknown transport {transport!r}: expected 'auto', 'shm' or 'c10d'")
    on_one_host = local >= size
    if transport == "shm" and not on_one_host:
        raise ValueError(
            f"transport='shm' requires all ranks on one host, but local_world_size={local} is less "
            f"than world_size={size}"
        )
    inside = "c10d" if transport == "c10d" else "shm"
    return World(size, min(local, size), inside if on_one_host else "c10d", inside)
