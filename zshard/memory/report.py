"""A model's memory: current, peak and predicted, of a wrapped model or before wrapping it.

The C core counts and predicts (csrc/engine/reserve.c); this file adds the state of
the optimizers that have stepped the model's parameters, which belongs to the optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from zshard import _core
from zshard.memory.dry_run import DryRun, Planned, World, dry_comms
from zshard.optim.hooks import seen_optimizers
from zshard.units.units import State, state_of, units_of

WHATS = ("now", "peak", "predicted")


def memory_of(module: nn.Module, what: str) -> dict[str, int]:
    """See FSDP.memory."""
    if what not in WHATS:
        known = ", ".join(repr(each) for each in WHATS)
        raise ValueError(f"memory(): what must be one of {known}, got {what!r}")
    state = state_of(module)
    states = [each for _, each in units_of(module)]
    held = _optimizer_bytes(states)
    state.optimizer_peak = max(state.optimizer_peak, held)
    if what == "now":
        return with_optimizer(_of_engines(states, _core.Engine.memory), held)
    if what == "peak":
        return with_optimizer(_of_engines(states, _core.Engine.peak), state.optimizer_peak)
    in_memory, elsewhere = (2 * _trained_bytes(states, where) for where in (False, True))
    predicted = _of_engines(states, lambda engine: engine.predict(False))
    return with_optimizer(predicted, held or in_memory, elsewhere)


def _of_engines(
    states: Iterable[State], count: Callable[[_core.Engine], dict[str, int]]
) -> dict[str, int]:
    """Return the sums over the models of these units, which are several if some have a process
    group of other ranks; each transport counts once."""
    models = {state.unit.engine_id: state for state in states}
    parts: dict[str, int] = {}
    transports: dict[int, int] = {}
    for state in models.values():
        found, group = count(state.unit.engine), id(state.comms.all)
        now = found.pop("transport")
        before = transports.get(group, 0)
        transports[group] = max(before, now)
        found["total"] -= now
        for part, number in found.items():
            parts[part] = parts.get(part, 0) + number
    total, offloaded = parts.pop("total"), parts.pop("offloaded")
    transport = sum(transports.values())
    return {**parts, "transport": transport, "offloaded": offloaded, "total": total + transport}


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


def predict(
    module: nn.Module, planned: list[Planned], world: World, state_tensors: int
) -> dict[str, int]:
    """Return what `module` takes on rank 0, in bytes by part, with that number of parameter-sized
    state tensors per parameter."""
    made = dry_run_of(module, planned, world)
    in_memory, elsewhere = (state_tensors * made.trained_bytes(where) for where in (False, True))
    return with_optimizer(made.predict(), in_memory, elsewhere)


def dry_run_of(module: nn.Module, planned: list[Planned], world: World) -> DryRun:
    """Return a dry run of `module` in a world without peers, with the root's strategy."""
    return DryRun(module, planned, dry_comms(world, planned[-1][1].strategy))
