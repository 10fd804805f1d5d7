"""Make the engine of a model and its units, real ones or dry ones: these have no memory.

The engine plans a step from the order of the units and the calls of a forward. Before the first
forward, the order of registration is the best guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from zshard import _core
from zshard.offload import set_offload
from zshard.ranks.transports import Comms
from zshard.units.units import Options
from zshard.wrap.initial_values import dtypes_of, names_of
from zshard.wrap.tree import UnitSpec

Call = tuple[_core.Unit, int]

_ENTER, _EXIT = -1, -2  # csrc/engine/plan.h has the same
_MOST_VISITS = 2  # further visits of a shared module add no information


def make_engine(
    module: nn.Module, comms: Comms, options: Options, dry: bool = False
) -> _core.Engine:
    """Make an engine with the options that apply to the model."""
    engine = _core.Engine(type(module).__name__, *comms)
    engine.set_prefetch(*options.prefetch)
    engine.keep_gathered(options.keep or 0)
    engine.set_codes(*options.wire.codes)
    if options.micro_batches:
        engine.add_leaves(options.micro_batches)
    if options.offload is not None and dry:
        engine.set_offload(None, *options.offload.what)
    else:
        set_offload(engine, options.offload)
    return engine


def make_unit(
    engine: _core.Engine,
    spec: UnitSpec,
    options: Options,
    dry: Sequence[nn.Parameter] | None = None,
) -> _core.Unit:
    """Make a unit; its module does not refer to it yet. dry: parameters of full shapes, for a unit
    without memory."""
    params, places = dry, []
    if params is None:
        params = [ref.param for ref in spec.params]
        places = [
            (i, owner._parameters, attribute)
            for i, ref in enumerate(spec.params)
            for owner, attribute in ref.owners
        ]
    kind = options.strategy.in_group.value
    facts = engine, spec.name, kind, names_of(spec), list(params), places
    return _core.Unit(*facts, *dtypes_of(spec, options), dry is not None)


def plan_forward(
    engine: _core.Engine,
    model: nn.Module,
    made: Sequence[tuple[UnitSpec, _core.Unit]],
    inner: Sequence[tuple[nn.Module, _core.Unit, _core.Unit]],
) -> list[_core.Unit]:
    """Give the engine the order of its units, and the calls of a forward.

    made: new units. inner: modules of earlier calls, each with its unit and the one that stands for
    it here. Neither includes units over other ranks. Returns the units in order, parents first.
    """
    units = {spec.module: unit for spec, unit in made}
    units |= {module: unit for module, _, unit in inner}
    order = [units[module] for module in model.modules() if module in units]
    engine.set_order(order)
    engine.set_calls(calls_of(model, made, {earlier: unit for _, earlier, unit in inner}))
    return order


def calls_of(
    model: nn.Module,
    planned: Sequence[tuple[UnitSpec, _core.Unit]],
    inner: Mapping[_core.Unit, _core.Unit],
) -> list[Call]:
    """Return the calls of a model with these units, for Engine.set_calls.

    planned: new units. inner: units of earlier calls, each with the one that stands for it here.
    Neither includes units over other ranks.
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
