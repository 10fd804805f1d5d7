"""Look up this rank's shard of a parameter by the parameter itself.

An optimizer knows parameters but no modules, and a parameter's memory identifies it only while its
unit is sharded. So wrapping registers each parameter of a unit here, for as long as it lives; an
entry refers to no module and no parameter.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zshard import _core
from zshard.units.extensions import refuse_writes
from zshard.units.moment import UNSHARDED, refuse
from zshard.units.units import State, units_of

__all__ = [
    *("Entry", "OptimizerContext", "Part", "Stepped", "context_of", "contexts", "entry_of"),
    *("known_parts", "part_of", "remember_parts", "sizes_for_torch"),
    *("states_stepped_by", "stepped_by", "units_stepped_by"),
]


Geometry = tuple[tuple[int, ...], tuple[int, ...], int, int]
"""The full shape, the shape of the shard, its first element, the number of shards."""


@functools.cache
def _geometry(*geometry: Any) -> Geometry:
    return geometry


@dataclass(eq=False, frozen=True)
class Part:
    """This rank's shard of a parameter: of its row-major elements, `numel` from `begin` on."""

    comm: _core.Comm  # the ranks that hold all shards
    shards: _core.Comm  # those of them that one replica is sharded over
    shape: tuple[int, ...]  # of the full parameter
    begin: int
    numel: int
    dtype: torch.dtype  # between steps
    is_cut: bool  # sharded; otherwise every rank has the full parameter
    _names: list[str]  # the unit's parameters, also known after the unit was freed
    _peers: list[weakref.ref[Any]]  # the ModelRecord of its model, if any
    _state: weakref.ref[State]
    index: int  # in the unit
    _of: Part | None = None  # for a view: the parameter's Part

    @property
    def name(self) -> str:
        """Return the parameter's dotted name, relative to the outermost wrapped module."""
        return self._names[self.index]

    @functools.cached_property
    def geometry(self) -> Geometry:
        """Identifies elements and shape: Parts for which these are equal share one object."""
        local = self.shape
        if self.is_cut and not (self.shape == () and self.numel == 1):
            local = (self.numel, *(1 for _ in self.shape[1:]))
        own = self.shape if local == self.shape else local  # the guard compares the objects
        return _geometry(self.shape, own, self.begin, self.shards.world)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape on this rank of a tensor that is sharded like the parameter."""
        return self.geometry[1]

    @property
    def elements(self) -> str:
        """Describe the elements, for messages."""
        if self.numel == 0:
            return f"no elements of shape {self.shape}"
        return f"elements {self.begin} to {self.begin + self.numel - 1} of shape {self.shape}"

    @property
    def root(self) -> Part:
        """Return the Part of the full parameter."""
        return self if self._of is None else self._of

    def of_view(self, shape: tuple[int, ...], offset: int) -> Part:
        """Return the Part of this rank's share of a view: the elements from `offset` on, as many as
        `shape` has, in that shape."""
        numel = math.prod(shape)
        begin = min(max(self.begin - offset, 0), numel)
        end = min(max(self.begin + self.numel - offset, begin), numel)
        return replace(self, shape=shape, begin=begin, numel=end - begin, _of=self.root)

    def of_groups(self, size: int) -> Part:
        """Return the Part of a flat tensor with one element for each `size` elements of the full
        parameter, where shards begin at multiples of `size`."""
        shape = (-(-self.whole_numel // size),)
        begin, numel = self.begin // size, -(-self.numel // size)
        return replace(self, shape=shape, begin=begin, numel=numel, _of=self.root)

    @property
    def unit(self) -> _core.Unit | None:
        """Return the parameter's unit; None if it was freed."""
        state = self._state()
        return None if state is None else state.unit

    @property
    def state(self) -> State | None:
        """Return its unit's state; None if the unit was freed."""
        return self._state()

    @property
    def peers(self) -> Any:
        """Return the shared_state.ModelRecord of the parameter's model; None if it has none or
        was freed with all units: then no session keeps a peer from stepping."""
        record = self._peers[0]() if self._peers else None
        return record if record is not None and record.has_units else None

    def is_whole_now(self) -> bool:
        """Return whether the parameter's unit is unsharded. Called by C."""
        unit = self.unit
        return unit is not None and unit.is_full

    def is_in_forward(self) -> bool:
        """Return whether a forward of the parameter's model runs on this thread."""
        unit = self.unit
        return unit is not None and unit.in_forward

    @property
    def is_size_read(self) -> bool:
        """Return whether a script has asked for this rank's size of the full parameter."""
        state = self.state
        return state is not None and self.index in state.sizes_read

    @property
    def whole_numel(self) -> int:
        return math.prod(self.shape)

    def of(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a tensor of the full shape; a view if possible."""
        if not self.is_cut:
            return whole
        elements = whole.detach().reshape(-1)[self.begin : self.begin + self.numel]
        return elements.reshape(self.local_shape)

    def takes(self, tensor: Tensor) -> bool:
        """Return whether a plain tensor of the shard's shape may be combined with the shard. If the
        script has read that shape, it may have filled the tensor with numbers that are the same on
        each rank, such as random ones; then only a constant tensor is safe, also where this rank
        has all elements, as the others have drawn none. A tensor of the full shape is
        unambiguous, as a load copies it."""
        if not self.is_size_read or not tensor.numel() or tensor.shape == self.shape:
            return True
        values = tensor.detach().reshape(-1)
        return bool((values == values[0]).all())

    def watch_data(self) -> None:
        """Note that a script is about to get the full parameter's `.data`; see Unit.watch(). Not
        within summon_full_params(), which keeps or discards what is written."""
        state = self.state
        if state is not None and not state.summons:
            state.unit.watch(self.index)

    def begin_write(self, tensor: Tensor) -> bool:
        """Note that a script is about to write to a shard of these elements in place. Waits until
        no other rank reads it. Returns whether end_write() must follow: not for a copy, and not
        within a step. Raises RuntimeError for a kept model."""
        unit = self.unit
        if unit is None:
            return False
        self._refuse_write(unit, tensor)
        return unit.begin_write(self.index, tensor)

    def end_write(self) -> None:
        """Note the end of the script's operation, whether it has raised or not."""
        unit = self.unit
        if unit is not None:
            unit.end_write()

    @contextlib.contextmanager
    def writing(self, tensor: Tensor, operation: Callable[..., Any]) -> Iterator[None]:
        """Context manager in which a script's operation writes to a shard of these elements: no
        other rank reads it there, and the write is noted unless it raises."""
        is_due = self.begin_write(tensor)
        try:
            yield
            self.note_write(tensor, operation)
        finally:
            if is_due:
                self.end_write()

    def note_write(self, tensor: Tensor, operation: Callable[..., Any]) -> None:
        """Note that a script has written to a shard of these elements in place, as all ranks
        must. Before an assignment to .data, which moves them."""
        unit = self.unit
        if unit is not None:
            self._refuse_write(unit, tensor)
            name = operation.__name__
            said = "an assignment to .data" if name == "__set__" else f"{name}()"
            unit.note_write(self.index, tensor, said)

    def note_draw(self, tensor: Tensor, drawn: int) -> None:
        """Note that a script has drawn random numbers for these elements in place. drawn: the same
        number on ranks that drew the same. No-op for a copy."""
        unit = self.unit
        if unit is not None and self.is_own(unit, tensor):
            unit.note_draw(self.index, drawn)

    def _refuse_write(self, unit: _core.Unit, tensor: Tensor) -> None:
        state = self.state
        if state is not None and state.model.is_kept and self.is_own(unit, tensor):
            refuse_writes([unit], f"a write to '{self.name}' in place")

    def is_own(self, unit: _core.Unit, tensor: Tensor) -> bool:
        """Return whether a tensor lies where the parameter does, also after p.data = t."""
        own = unit.params[self.index].untyped_storage()
        return bool(own._cdata == tensor.untyped_storage()._cdata)

    def reshard(self) -> None:
        """Reshard a parameter that a forward has kept, so that it has its between-steps shape and
        dtype. Raises RuntimeError while it is unsharded by hand, and during a forward or backward.
        """
        state = self.state
        if state is not None:
            refuse([state], "load an optimizer's state", UNSHARDED)
            if state.unit.is_full:
                state.unit.unpin()


class Entry(NamedTuple):
    """A tensor of a model, an optimizer, an average or a file, and what this rank has of it."""

    name: str
    shape: tuple[int, ...]  # of the full tensor
    dtype: torch.dtype  # in which it is saved or given
    value: Any = None  # a Tensor; None: this rank has nothing of it
    part: Part | None = None  # which elements `value` has; None: all, and they are this rank's own
    unit: _core.Unit | None = None  # whose parameter it is, if it is sharded

    @property
    def size(self) -> int:
        """Return the bytes of the full tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@contextlib.contextmanager
def sizes_for_torch(module: nn.Module) -> Iterator[None]:
    """Context manager in which torch reads the sizes of a model's shards, but computes nothing from
    them: these reads do not count as the script's."""
    before = [(state, set(state.sizes_read)) for _, state in units_of(module)]
    try:
        yield
    finally:
        for state, sizes in before:
            state.sizes_read = sizes


_parts: dict[int, tuple[weakref.ref[Tensor], Part]] = {}
"""By id(). Loading and saving look up often, for each tensor of an optimizer's state, and torch's
own dictionary with weak keys takes eight times as long: it makes a reference for each look-up."""


def known_parts() -> list[tuple[Tensor, Part]]:
    """Return all parameters of this process that FSDP has wrapped, with their Parts."""
    known = [(reference(), part) for reference, part in list(_parts.values())]
    return [(param, part) for param, part in known if param is not None]


def remember_parts(state: State) -> None:
    """Register the parameters of a new unit."""
    unit = state.unit
    for context in list(contexts.values()):  # an optimizer may be older than its model
        context.ids = None
    for index, param in enumerate(unit.params):
        facts = unit.param(index)
        part = Part(
            state.comms.all,
            state.comms.shards,
            tuple(facts["shape"]),
            facts["begin"],
            facts["numel"],
            param.dtype,
            not unit.replicated,
            state.names,
            state.peers_seen,
            weakref.ref(state),
            index,
        )
        forget = functools.partial(_forget, _parts, id(param))
        _parts[id(param)] = weakref.ref(param, forget), part


def _forget(
    parts: dict[int, tuple[weakref.ref[Tensor], Part]], key: int, dead: weakref.ref[Tensor]
) -> None:
    """Remove the entry, unless it belongs to another tensor by now. parts: passed, since at exit
    Python empties this module before the last parameters die."""
    if key in parts and parts[key][0] is dead:
        del parts[key]


def part_of(param: Tensor) -> Part | None:
    """Return the Part of a parameter that FSDP has wrapped, sharded or not; None for others."""
    known = _parts.get(id(param))
    return known[1] if known is not None and known[0]() is param else None


def entry_of(param: Tensor, unit: _core.Unit) -> Entry:
    """Return the entry of a sharded parameter of a unit, as it is now."""
    part = _parts[id(param)][1]
    return Entry(part.name, part.shape, param.dtype, param, part, unit)


@dataclass(eq=False)
class Stepped:
    """An optimizer's share of one sharded model."""

    _state: weakref.ref[State]  # one of its units
    replicated: bool  # every rank has the full model
    groups: tuple[tuple[int, int, int], ...]
    """(index of the param group, index in it of the model's first parameter, number of those).
    Groups without any are left out, but for replicated models: their optimizers may share out the
    parameters among ranks, as ZeroRedundancyOptimizer does."""

    @property
    def facts(self) -> tuple[object, ...]:
        """Equal for the same share of the same model."""
        return self._state, self.replicated, self.groups

    @property
    def state(self) -> State | None:
        """Return the state of one unit of the model; None if it was freed."""
        return self._state()

    @property
    def peers(self) -> Any:
        """As Part.peers."""
        state = self._state()
        return None if state is None else state.peers


@dataclass(eq=False)
class OptimizerContext:
    """The record of one optimizer."""

    ids: list[list[int]] | None = None  # of its parameters; None: a model was wrapped since then
    models: list[Stepped] = field(default_factory=list)
    # optim/hooks.py's: `models` when its state was last looked at; whether it has made a step; how
    # deep in its own step() it is, as a step() may call that of its base class; whether that has
    # not ended, and has begun to write; the optimizer of the same models whose step calls this one.
    seen: list[Stepped] | None = None
    is_checked: bool = False
    depth: int = 0
    is_open: bool = False
    has_begun: bool = False
    outer: OptimizerContext | None = None
    keys: dict[str, str] = field(default_factory=dict)  # its name on each model's board, by token
    accounts: dict[int, Any] = field(default_factory=dict)  # of each model, by the model's ranks
    # The last backward: torch's id of it, the ids of handles it is not over for, groups stepped.
    in_backward: tuple[int, set[int], set[int]] = field(default_factory=lambda: (-1, set(), set()))


contexts: weakref.WeakKeyDictionary[torch.optim.Optimizer, OptimizerContext]
contexts = weakref.WeakKeyDictionary()


def context_of(optimizer: torch.optim.Optimizer) -> OptimizerContext:
    """Return the optimizer's context, a new one for a new optimizer."""
    context = contexts.get(optimizer)
    if context is None:
        context = contexts[optimizer] = OptimizerContext()
    return context


def stepped_by(optimizer: torch.optim.Optimizer) -> list[Stepped]:
    """Return the optimizer's share of each sharded model."""
    ids, context = ids_of(optimizer), context_of(optimizer)
    # A model may outlive one of its units.
    if context.ids != ids or any(each.state is None for each in context.models):
        context.ids, context.models = ids, _models_of(optimizer)
    return context.models


def ids_of(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """Return the ids of each param group's parameters, to notice that a script has changed them."""
    return [list(map(id, group["params"])) for group in optimizer.param_groups]


def states_stepped_by(optimizer: torch.optim.Optimizer) -> list[State]:
    """Return the state of one unit of each sharded model that has parameters in the optimizer."""
    states = (each.state for each in stepped_by(optimizer))
    return [state for state in states if state is not None]


def units_stepped_by(optimizer: torch.optim.Optimizer) -> list[_core.Unit]:
    """Return these states' units."""
    return [state.unit for state in states_stepped_by(optimizer)]


def _models_of(optimizer: torch.optim.Optimizer) -> list[Stepped]:
    """By the root's ranks, as inner units may be adopted."""
    states: dict[int, weakref.ref[State]] = {}
    cut: set[int] = set()
    groups: dict[int, dict[int, tuple[int, int]]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            part = part_of(param)
            state = part._state() if part is not None else None
            if part is None or state is None:
                continue
            model = state.unit.engine_id
            states.setdefault(model, part._state)
            if part.is_cut:
                cut.add(model)
            first, n = groups.setdefault(model, {}).get(number, (index, 0))
            groups[model][number] = first, n + 1
    found = []
    for model, reference in states.items():
        numbers = groups[model] if model in cut else range(len(optimizer.param_groups))
        rows = tuple((number, *groups[model].get(number, (0, 0))) for number in numbers)
        found.append(Stepped(reference, model not in cut, rows))
    return found
