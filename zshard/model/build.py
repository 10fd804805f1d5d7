"""What sharding adds to the modules of a model: units, classes, buffers from rank 0.

A unit's module stays the same object with the same parameters and names; its class becomes a
subclass of (FSDP, its class).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from zshard import _core
from zshard.guard.outside import tell_of_barriers
from zshard.optim.state_registry import meet
from zshard.units.units import BufferSync, Options, is_apart, state_of, units_of, writing
from zshard.wrap.extensions import EXTENSIONS
from zshard.wrap.initial_values import dtypes_of, names_of
from zshard.wrap.tree import UnitSpec

MADE = "_zshard_made"
"""An attribute of the classes that class_for() makes, which are no subclasses to a model."""


def core_unit(engine: _core.Engine, spec: UnitSpec, options: Options) -> _core.Unit:
    """Make the unit; its module does not refer to it yet."""
    params = [ref.param for ref in spec.params]
    places = [
        (i, owner._parameters, attribute)
        for i, ref in enumerate(spec.params)
        for owner, attribute in ref.owners
    ]
    kind = options.strategy.in_group.value
    dtypes = dtypes_of(spec, options)
    return _core.Unit(engine, spec.name, kind, names_of(spec), params, places, *dtypes)


_classes: dict[tuple[type[nn.Module], type[nn.Module]], type[Any]] = {}


def class_for(base: type[nn.Module], original: type[nn.Module]) -> type[Any]:
    """Return the class of a unit whose module is of class `original`; base: FSDP. Raises TypeError
    if no such class can exist."""
    if (base, original) not in _classes:

        def make_plain(cls: type, *args: object, **kwargs: object) -> Any:
            """Return the result of type(model)(...), as a container creates it when it is
            sliced."""
            return original(*args, **kwargs)

        # Libraries look classes up by __name__ (transformers: is this a causal language model?).
        name, shown = original.__name__, f"FSDP{original.__qualname__}"
        names = {"__module__": original.__module__, "__qualname__": shown, "__new__": make_plain}
        names[MADE] = True
        for each in EXTENSIONS:
            names |= each.methods(original)
        _classes[base, original] = type(name, (base, original), names)
    return _classes[base, original]


@contextlib.contextmanager
def last_writes(module: nn.Module) -> Iterator[None]:
    """Context manager for the last writes to a new model; afterwards other ranks may evaluate with
    its shards."""
    state = state_of(module)
    meet(module, state.comms.shards)
    tell_of_barriers(state)
    with writing([state.unit]):
        yield


def sync_buffers(module: nn.Module, when: BufferSync) -> None:
    """Broadcast a model's buffers from rank 0 at the start of its forwards. A script may replace
    buffers, so each pass broadcasts the modules' current ones."""
    state = state_of(module)
    state.sync_buffers = when
    if state.comms.all.world == 1:
        return
    root, engine = weakref.ref(module), state.unit.engine
    comms, in_training = state.comms, when == "training"

    def set_buffers() -> None:
        model = root()
        if model is not None:
            inner = [unit for unit, each in units_of(model) if is_apart(each, comms)]
            apart = {id(buffer) for unit in inner for buffer in unit.buffers()}
            engine.sync_buffers([b for b in model.buffers() if id(b) not in apart], in_training)

    for _, each in units_of(module):
        if not is_apart(each, comms):
            each.unit.buffers = set_buffers
    set_buffers()  # a rank without data takes part in join() before a forward of its own


def broadcast_buffers(module: nn.Module) -> None:
    """Broadcast buffers as the next training forward would, for evaluations before it.
    Collective."""
    state = state_of(module)
    if state.sync_buffers and state.comms.all.world > 1:
        state.unit.engine.broadcast_buffers()
