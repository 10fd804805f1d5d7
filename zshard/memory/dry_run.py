"""Dry runs: units with layouts and no memory, on transports without peers, to estimate memory.

The estimate does not come from separate formulas but from the same code that
allocates (csrc/engine/unit_life.c, csrc/engine/plan.h). A dry run is made from parameters on any
device, the meta device included; it changes nothing and needs no process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from zshard import _core
from zshard.memory.forward_order import Call, calls_of_specs
from zshard.ranks.transports import Comms
from zshard.strategy import ShardingStrategy
from zshard.units.units import Options, State, without_memory
from zshard.wrap.initial_values import dtypes_of, names_of
from zshard.wrap.tree import ParamRef, UnitSpec

Planned = tuple[UnitSpec, Options]


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
    """Return what zshard.ranks.transports.comms_for would in such a world, without peers."""

    def comm(transport: str, size: int) -> _core.Comm:
        per_host = world.per_host if size == world.size else 0
        return _core.Comm.dry_run(transport if size > 1 else "self", rank % size, size, per_host)

    everyone = comm(world.transport, world.size)
    shard_group = world.shard_group if strategy.is_hybrid else world.size
    if strategy is ShardingStrategy.ZERO1:
        shard_group = 1
    if strategy.keeps:
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

    inner: units of earlier calls below `module`, included in the estimate. dtype: assume that all
        floating-point parameters have it.
    """

    def __init__(
        self,
        module: nn.Module,
        planned: Sequence[Planned],
        comms: Comms,
        inner: Sequence[tuple[nn.Module, State]] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        self._dtype = dtype
        self.engine = _core.Engine(type(module).__name__, *comms)
        self.engine.set_prefetch(*planned[-1][1].prefetch.ahead)
        self.engine.keep_gathered(*planned[-1][1].keep)
        self.engine.set_codes(*planned[-1][1].wire.codes)
        offload = planned[-1][1].offload
        if offload is not None:
            self.engine.set_offload(None, *offload.what)
        self.units = [self._make(spec, options) for spec, options in planned]
        stands_for = {}
        pairs = list(zip((spec for spec, _ in planned), self.units, strict=True))
        self.inner = []
        for each, state in inner:
            spec = _spec_of(each, state)
            self.engine.set_offload(None, *state.unit.offloads, 1.0)
            self.engine.set_codes(*state.options.wire.codes)
            unit = self._make(spec, state.options, _whole_params(state.unit))
            self.inner.append(unit)
            stands_for[id(state.unit)] = unit
            pairs.append((spec, unit))
        place = {id(each): i for i, each in enumerate(module.modules())}
        pairs.sort(key=lambda pair: place[id(pair[0].module)])
        self._specs = {id(unit): spec for spec, unit in pairs}
        self.engine.set_order([unit for _, unit in pairs])
        calls: list[Call] = calls_of_specs(module, pairs, stands_for)
        self.engine.set_calls(calls)

    def _make(
        self, spec: UnitSpec, options: Options, params: list[nn.Parameter] | None = None
    ) -> _core.Unit:
        kind = options.strategy.in_group.value
        if params is None:
            params = [self._as_dtype(ref.param) for ref in spec.params]
        dtypes = dtypes_of(spec, options)
        return _core.Unit(self.engine, spec.name, kind, names_of(spec), params, [], *dtypes, True)

    def _as_dtype(self, param: nn.Parameter) -> nn.Parameter:
        if self._dtype is None or not param.is_floating_point():
            return param
        made = torch.empty(param.shape, dtype=self._dtype, device="meta")
        return nn.Parameter(made, requires_grad=param.requires_grad)

    def predict(self, stepped: bool = False) -> dict[str, int]:
        """Return bytes by part, like Engine.predict."""
        return self.engine.predict(stepped)

    def trained_bytes(self, offloaded: bool = False) -> int:
        """Return the bytes of this rank's shards of trainable parameters, the size of one tensor of
        optimizer state; of those whose state is in memory, or (`offloaded`) on disk."""
        total = 0
        for unit in [*self.units, *self.inner]:
            if unit.offloads[2] is not offloaded:
                continue
            for i, ref in enumerate(self._specs[id(unit)].params):
                if ref.param.requires_grad:
                    total += unit.param(i)["numel"] * ref.param.itemsize
        return total


def _whole_params(unit: _core.Unit) -> list[nn.Parameter]:
    return [
        without_memory(param, unit.param(i)["shape"], "meta") for i, param in enumerate(unit.params)
    ]


def _spec_of(module: nn.Module, state: State) -> UnitSpec:
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for each in module.modules():
        for name, held in each._parameters.items():
            owners.setdefault(id(held), []).append((each, name))
    params = state.unit.params
    names = [(state.unit.param(i)["name"],) for i in range(len(params))]
    refs = [
        ParamRef(name, param, tuple(owners.get(id(param), ())))
        for name, param in zip(names, params, strict=True)
    ]
    return UnitSpec(module, state.unit.name, refs)
