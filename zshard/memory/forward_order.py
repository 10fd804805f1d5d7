"""What a forward does when modules run in the order in which they stand in the model.

Which unit is whole when, and so how much memory a step takes, follows from the order
in which modules are entered and left and parameters are used. The order of registration is the best
guess before the first forward; csrc/engine/plan.h says what is made of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from zshard import _core
from zshard.wrap.tree import UnitSpec

_ENTER, _EXIT = -1, -2  # csrc/engine/plan.h has the same
_MOST_VISITS = 2  # more of a shared module tell nothing new

Call = tuple[_core.Unit, int]


def _hooked(model: nn.Module) -> dict[int, _core.Unit]:
    """Return the units by the id of the modules whose hooks unshard them."""
    found = {}
    for module in model.modules():
        owners = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
        found.update({id(module): each for each in owners if isinstance(each, _core.Unit)})
    return found


def calls_of(model: nn.Module, units: list[_core.Unit]) -> list[Call]:
    """Return the calls of a model whose modules have their hooks; for Engine.set_calls.

    units: those of its engine. Inner modules may belong to another one.
    """
    own = {id(unit) for unit in units}
    hooked = {at: unit for at, unit in _hooked(model).items() if id(unit) in own}
    used = {id(param): (unit, index) for unit in units for index, param in enumerate(unit.params)}
    return list(_Walk(hooked, used).of(model))


def calls_of_specs(
    model: nn.Module,
    pairs: list[tuple[UnitSpec, _core.Unit]],
    stands_for: Mapping[int, _core.Unit],
) -> list[Call]:
    """Return the calls that `model` will have once it is wrapped with these units.

    stands_for: those of them that replace a unit which already exists, hooks included, by the id of
        that unit.
    """
    root = model if len(pairs) - len(stands_for) > 1 else None
    hooked = {  # units over other ranks are in no pair
        at: stands_for[id(unit)] for at, unit in _hooked(model).items() if id(unit) in stands_for
    }
    used = {}
    there = {id(unit) for unit in stands_for.values()}
    for spec, unit in pairs:
        used.update({id(ref.param): (unit, i) for i, ref in enumerate(spec.params)})
        if id(unit) in there:
            continue
        if unit.is_hooked:
            hooked[id(spec.module)] = unit
        if unit.is_hooked and not unit.replicated:
            hooked.update({id(part): unit for part in parts_to_guard(spec, root)})
    return list(_Walk(hooked, used).of(model))


def parts_to_guard(spec: UnitSpec, root: nn.Module | None) -> Iterator[nn.Module]:
    """Yield the submodules of a unit whose calls unshard it as well: scripts call submodules
    directly, as generate() calls `model.encoder(ids)` with a shared embedding in the root's unit.

    They are those that own parameters of a `root` with several units, usually few, and all
    embeddings: most modules fail on weights of a shard's shape, but an embedding would silently
    look up in it.
    """
    owners = {id(owner): owner for ref in spec.params for owner, _ in ref.owners}
    for owner in owners.values():
        is_embedding = isinstance(owner, nn.Embedding | nn.EmbeddingBag)
        if owner is not spec.module and (spec.module is root or is_embedding):
            yield owner


class _Walk:
    """One walk over a model's modules. hooked: units by the id of the modules that make them whole;
    used: (unit, index) by the id of parameters."""

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
