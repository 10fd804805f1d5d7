"""Dry runs: units with layouts and no memory, on transports without peers, to estimate memory.

The estimate comes from the code that allocates (csrc/engine/unit_life.c, csrc/engine/plan.h), not
from separate formulas. A dry run takes parameters on any device, including the meta device; it
changes nothing and needs no process group.

How much memory a step takes depends on which units are unsharded at the same time, and so on the
order in which modules run and parameters are used. Before the first forward, the order of
registration is the best guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from zshard import _core, upper
from zshard.optim.sharded_state import SCALARS, SizeOf, bytes_declared, one_tensor
from zshard.ranks.transports import Comms
from zshard.strategy import ShardingStrategy
from zshard.units.extensions import ParamRef
from zshard.units.units import State, without_memory
from zshard.wrap.build import make_engine, make_unit, plan_forward
from zshard.wrap.tree import UnitSpec


class World(NamedTuple):
    """The ranks that a prediction assumes.

    size: all ranks. shard_group: size of the shard group of a hybrid strategy. transport: "shm",
    "hosts" or "c10d", between all ranks; inside: within a shard group. per_host: ranks of each
    host, 0 if all are on one.
    """

    size: int
    shard_group: int
    transport: str
    inside: str
    per_host: int = 0


def world_of(comms: Comms) -> World:
    """Return the world in which a model is being wrapped."""
    inside = comms.shard_group.transport if comms.replica_group is None else comms.all.transport
    shard_group = comms.shards.world if comms.replica_group is None else comms.shard_group.world
    return World(comms.all.world, shard_group, comms.all.transport, inside, comms.all.per_host)


def dry_comms(world: World, strategy: ShardingStrategy, rank: int = 0) -> Comms:
    """Return what zshard.ranks.transports.comms_for would return in such a world, without peers."""

    def comm(transport: str, size: int) -> _core.Comm:
        per_host = world.per_host if size == world.size else 0
        return _core.Comm.dry_run(transport if size > 1 else "self", rank % size, size, per_host)

    everyone = comm(world.transport, world.size)
    shard_group = world.shard_group if strategy.is_hybrid else world.size
    if strategy is ShardingStrategy.ZERO1:
        shard_group = 1
    if strategy.has_secondary:
        if world.transport == "shm" or shard_group == world.size:
            return Comms(everyone, everyone, everyone, None)
        replica_group = everyone if shard_group == 1 else comm("c10d", world.size // shard_group)
        return Comms(everyone, everyone, comm(world.inside, shard_group), replica_group)
    if shard_group == world.size:
        return Comms(everyone, everyone, everyone, None)
    inner = comm(world.inside, shard_group)
    return Comms(everyone, inner, inner, None)


class DryRun:
    """A dry run of wrapping `module` with these units over these ranks.

    inner: units of earlier calls below `module`, included in the estimate.
    """

    def __init__(
        self,
        module: nn.Module,
        specs: Sequence[UnitSpec],
        comms: Comms,
        inner: Sequence[tuple[nn.Module, State]] = (),
    ) -> None:
        self.module, self.specs = module, specs
        self.engine = make_engine(module, comms, specs[-1].options, dry=True)
        self.units = [make_unit(self.engine, spec, _params_of(spec)) for spec in specs]
        pairs = list(zip(specs, self.units, strict=True))
        earlier = [self._make_again(each, state) for each, state in inner]
        self.inner = [unit for _, unit in earlier]
        of_units = {unit: spec for spec, unit in [*pairs, *earlier]}
        stand_ins = [(m, s.unit, unit) for (m, s), unit in zip(inner, self.inner, strict=True)]
        order = plan_forward(self.engine, module, pairs, stand_ins)
        self._specs = {unit: of_units[unit] for unit in order}

    def _make_again(self, module: nn.Module, state: State) -> tuple[UnitSpec, _core.Unit]:
        """Return the dry-run counterpart of a unit of an earlier call, with its spec."""
        unit = state.unit
        owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for each in module.modules():
            for name, held in each._parameters.items():
                owners.setdefault(id(held), []).append((each, name))
        facts = [(param, unit.param(i)) for i, param in enumerate(unit.params)]
        refs = [ParamRef(f["name"], p, tuple(owners.get(id(p), ()))) for p, f in facts]
        spec = UnitSpec(module, unit.name, state.options, refs)
        self.engine.set_offload(None, *unit.offloads, 1.0)
        self.engine.set_codes(*state.options.wire.codes)
        params = [without_memory(param, fact["shape"], "meta") for param, fact in facts]
        return spec, make_unit(self.engine, spec, params)

    @property
    def in_order(self) -> list[tuple[_core.Unit, UnitSpec]]:
        """The units and their specs, in the order of Engine.predict_events()."""
        return list(self._specs.items())

    def state_bytes(self, optimizer: str | int | None) -> tuple[int, int]:
        """Return the bytes of an optimizer's state in memory, and offloaded. optimizer: as for
        predict_memory()."""
        size_of = _size_of_state(optimizer, self.module)
        return self.trained_bytes(False, size_of), self.trained_bytes(True, size_of)

    def trained_bytes(self, offloaded: bool = False, size_of: SizeOf = one_tensor) -> int:
        """See the function of this name."""
        units = ((unit, _params_of(spec)) for unit, spec in self._specs.items())
        return trained_bytes(units, offloaded, size_of)


def _params_of(spec: UnitSpec) -> list[nn.Parameter]:
    return [ref.param for ref in spec.params]


def trained_bytes(
    units: Iterable[tuple[_core.Unit, Sequence[nn.Parameter]]],
    offloaded: bool = False,
    size_of: SizeOf = one_tensor,
) -> int:
    """Return the bytes of the optimizer's state of trainable parameters on this rank; only of those
    whose state is in memory, or (`offloaded`) on disk.

    units: with their parameters. size_of: by default, one tensor of each.
    """
    return sum(
        size_of(param, unit.param(i)["numel"])
        for unit, params in units
        if unit.offloads[2] is offloaded
        for i, param in enumerate(params)
        if param.requires_grad
    )


# --- the state of optimizers ----------------------------------------------------------------------

STATE_TENSORS = {
    **dict.fromkeys(("adam", "adamw", "adamax", "nadam", "radam", "adadelta", "rprop"), 2),
    **{"sgd": 0, "rmsprop": 1, "adagrad": 1, "asgd": 1},
}
"""Number of parameter-sized state tensors per parameter, by the class of an optimizer."""

_ADD_ONE = ("amsgrad", "centered", "momentum")
"""Options of those in STATE_TENSORS that ask for one more tensor."""


def _size_of_state(optimizer: str | int | None, module: nn.Module) -> SizeOf:
    """Return the function for the bytes of an optimizer's state."""
    name = optimizer.lower() if isinstance(optimizer, str) else None
    if name in upper.OPTIMIZERS:
        size_of: SizeOf = upper.module_for(name).bytes_by_name(name, module)
        return size_of
    count = 0 if optimizer is None else STATE_TENSORS.get(name or "", optimizer)
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        names = ", ".join(map(repr, (*STATE_TENSORS, *upper.OPTIMIZERS)))
        raise ValueError(
            f"unknown optimizer {optimizer!r}: pass one of {names}, or its number of state tensors"
        )
    return lambda param, numel: count * one_tensor(param, numel)


def size_in_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> SizeOf | None:
    """Return the function for the bytes of state that a step creates for parameters of this group;
    None if it creates none, or is not known."""
    declare = getattr(optimizer, "state_layout", None)
    if declare is not None:  # zshard's
        names = {name for param in group["params"] for name in declare(group, param)}
        if not names - SCALARS:
            return None
        return lambda param, numel: bytes_declared(declare(group, param), param, numel)
    count = STATE_TENSORS.get(type(optimizer).__name__.lower())
    if count is None:
        return None
    count += sum(bool(group.get(option)) for option in _ADD_ONE)
    return (lambda param, numel: count * one_tensor(param, numel)) if count > 0 else None
