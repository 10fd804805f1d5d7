"""Dry runs: units with layouts and no memory, on transports without peers, to estimate memory.

The estimate comes from the code that allocates (csrc/engine/unit_life.c, csrc/engine/plan.h), not
from separate formulas. A dry run takes parameters on any device, including the meta device; it
changes nothing and needs no process group.

How much memory a step takes depends on which units are unsharded at the same time, and so on the
order in which modules run and parameters are used. Before the first forward, the order of
registration is the best guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from zshard import _core
from zshard.ranks.transports import Comms
from zshard.strategy import ShardingStrategy
from zshard.units.extensions import ParamRef
from zshard.units.units import Options, State, without_memory
from zshard.wrap.initial_values import dtypes_of, names_of
from zshard.wrap.tree import UnitSpec

Planned = tuple[UnitSpec, Options]
Call = tuple[_core.Unit, int]

_ENTER, _EXIT = -1, -2  # csrc/engine/plan.h has the same
_MOST_VISITS = 2  # further visits of a shared module add no information


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
        options = planned[-1][1]
        self.engine = _core.Engine(type(module).__name__, *comms)
        self.engine.set_prefetch(*options.prefetch)
        self.engine.keep_gathered(options.keep or 0)
        self.engine.set_codes(*options.wire.codes)
        if options.micro_batches:
            self.engine.add_leaves(options.micro_batches)
        if options.offload is not None:
            self.engine.set_offload(None, *options.offload.what)
        self.units = [self._make(spec, options) for spec, options in planned]
        pairs = list(zip((spec for spec, _ in planned), self.units, strict=True))
        earlier = [self._make_again(each, state) for each, state in inner]
        self.inner = [unit for _, unit in earlier]
        place = {each: i for i, each in enumerate(module.modules())}
        in_order = sorted([*pairs, *earlier], key=lambda pair: place[pair[0].module])
        self._specs = {unit: spec for spec, unit in in_order}
        self.engine.set_order(list(self._specs))
        stands_in = {s.unit: unit for (_, s), unit in zip(inner, self.inner, strict=True)}
        self.engine.set_calls(calls_of(module, pairs, stands_in))

    def _make_again(self, module: nn.Module, state: State) -> tuple[UnitSpec, _core.Unit]:
        """Return the dry-run counterpart of a unit of an earlier call, with its spec."""
        unit = state.unit
        owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for each in module.modules():
            for name, held in each._parameters.items():
                owners.setdefault(id(held), []).append((each, name))
        facts = [(param, unit.param(i)) for i, param in enumerate(unit.params)]
        refs = [ParamRef((f["name"],), p, tuple(owners.get(id(p), ()))) for p, f in facts]
        spec = UnitSpec(module, unit.name, refs)
        self.engine.set_offload(None, *unit.offloads, 1.0)
        self.engine.set_codes(*state.options.wire.codes)
        params = [without_memory(param, fact["shape"], "meta") for param, fact in facts]
        return spec, self._make(spec, state.options, params)

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

    @property
    def in_order(self) -> list[tuple[_core.Unit, UnitSpec]]:
        """The units and their specs, in the order of Engine.predict_events()."""
        return list(self._specs.items())

    def predict(self, stepped: bool = False) -> dict[str, int]:
        """Return bytes by part, like Engine.predict."""
        return self.engine.predict(stepped)

    def trained_bytes(self, offloaded: bool = False, size_of: SizeOf | None = None) -> int:
        """See the function of this name."""
        return trained_bytes(
            (
                (unit, [self._as_dtype(ref.param) for ref in spec.params])
                for unit, spec in self._specs.items()
            ),
            offloaded,
            size_of or one_tensor,
        )


SizeOf = Callable[[nn.Parameter, int], int]
"""Bytes of an optimizer's state, given a full parameter and how many of its elements a rank has."""


def one_tensor(param: nn.Parameter, numel: int) -> int:
    """Return the bytes of one tensor like the parameter's shard."""
    return numel * param.itemsize


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


# --- the order of a forward -----------------------------------------------------------------------


def calls_of(
    model: nn.Module,
    planned: Sequence[tuple[UnitSpec, _core.Unit]],
    inner: Mapping[_core.Unit, _core.Unit],
) -> list[Call]:
    """Return the calls of a model with these units, for Engine.set_calls.

    planned: new units. inner: units of earlier calls, each with its dry-run counterpart. Neither
    includes units over other ranks.
    """
    hooked = {at: inner[unit] for at, unit in _hooked(model).items() if unit in inner}
    used = {
        id(param): (unit, i)
        for earlier, unit in inner.items()
        for i, param in enumerate(earlier.params)
    }
    for spec, unit in planned:
        used.update({id(ref.param): (unit, i) for i, ref in enumerate(spec.params)})
        if unit.is_hooked:
            hooked[id(spec.module)] = unit
        if unit.is_hooked and not unit.replicated:
            parts = parts_to_guard(spec, model if len(planned) > 1 else None)
            hooked.update({id(part): unit for part in parts})
    return list(_Walk(hooked, used).of(model))


def _hooked(model: nn.Module) -> dict[int, _core.Unit]:
    """Return the units by the ids of the modules whose hooks unshard them."""
    found = {}
    for module in model.modules():
        owners = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
        found.update({id(module): each for each in owners if isinstance(each, _core.Unit)})
    return found


def parts_to_guard(spec: UnitSpec, root: nn.Module | None) -> Iterator[nn.Module]:
    """Yield the submodules of a unit whose direct calls also unshard it. Scripts call submodules
    directly, as generate() calls `model.encoder(ids)` with a shared embedding in the root's unit.

    These are the modules that own parameters of a `root` with several units, usually few, and all
    embeddings. Most modules fail on weights of a shard's shape, but an embedding would silently
    read wrong rows.
    """
    owners = {id(owner): owner for ref in spec.params for owner, _ in ref.owners}
    for owner in owners.values():
        is_embedding = isinstance(owner, nn.Embedding | nn.EmbeddingBag)
        if owner is not spec.module and (spec.module is root or is_embedding):
            yield owner


class _Walk:
    """One walk over a model's modules. hooked: units by the ids of the modules that unshard them;
    used: (unit, index) by parameter id."""

    def __init__(
        self, hooked: Mapping[int, _core.Unit], used: Mapping[int, tuple[_core.Unit, int]]
    ) -> None:
        self._hooked = hooked
        self._used = used
        self._visits: dict[int, int] = {}
        self._open: set[int] = set()
        self._seen: set[int] = set()

    def of(self, module: nn.Module) -> Iterator[Call]:
        key = id(module)
        visits = self._visits.get(key, 0)
        if key in self._open or visits == _MOST_VISITS:
            return
        self._visits[key] = visits + 1
        self._open.add(key)
        unit = self._hooked.get(key)
        if unit is not None:
            yield unit, _ENTER
        for param in module._parameters.values():
            if id(param) in self._used and id(param) not in self._seen:
                self._seen.add(id(param))
                yield self._used[id(param)]
        for child in module._modules.values():
            if child is not None:
                yield from self.of(child)
        if unit is not None:
            yield unit, _EXIT
        self._open.remove(key)
