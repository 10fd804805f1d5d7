"""Which part of a parameter this rank holds, asked of the parameter itself.

The one idea: an optimizer knows parameters and no modules, and a parameter's memory tells what it
is only while its unit is sharded. So each parameter of a unit is entered here when it is wrapped,
for as long as it lives; an entry leads to no module and no parameter.
"""

from __future__ import annotations

import functools
import math
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from zshard import _core
from zshard._units import State

__all__ = ["Part", "part_of", "remember_parts"]


@dataclass(eq=False, frozen=True)
class Part:
    """This rank's part of a parameter: of its row-major elements, `numel` from `begin` on."""

    comm: _core.Comm  # of the ranks that hold all parts
    shards: _core.Comm  # of them, those that one copy is cut over
    shape: tuple[int, ...]  # of the whole parameter
    begin: int
    numel: int
    dtype: torch.dtype  # between steps
    is_cut: bool  # else every rank has the whole
    _first_name: str
    _state: weakref.ref[State]
    _index: int

    @property
    def name(self) -> str:
        """The parameter's dotted name, from the outermost wrapped module on."""
        state = self._state()
        return str(state.unit.param(self._index)["name"]) if state else self._first_name

    @property
    def local_shape(self) -> tuple[int, ...]:
        """What a tensor that is cut as the parameter is has as its shape on this rank."""
        if not self.is_cut or (self.shape == () and self.numel == 1):
            return self.shape
        return (self.numel, *(1 for _ in self.shape[1:]))

    @property
    def whole_numel(self) -> int:
        return math.prod(self.shape)

    def of(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor of the whole shape; a view where that can be."""
        if not self.is_cut:
            return whole
        elements = whole.detach().reshape(-1)[self.begin : self.begin + self.numel]
        return elements.reshape(self.local_shape)

    def settle(self, param: Tensor) -> None:
        """Gives back the whole parameter that a forward has kept, so that `param` has the shape and
        dtype that it has between steps. RuntimeError where unshard() has made it whole, and in a
        forward or backward."""
        held = _core.held_unit(param)
        if held is not None:
            raise RuntimeError(
                f"the parameters of unit '{held or '(root)'}' are whole copies, made by unshard(); "
                "call reshard() on its module before the optimizer's load_state_dict()"
            )
        state = self._state()
        if state is not None and state.unit.is_full:
            state.unit.let_go()


_parts: dict[int, tuple[weakref.ref[Tensor], Part]] = {}
"""By id(). Loading and saving ask often, for each tensor of an optimizer's state, and torch's own
dictionary with weak keys takes eight times as long: it makes a reference for each question."""


def remember_parts(state: State) -> None:
    """Enters the parameters of a unit that has just been made."""
    unit = state.unit
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
            facts["name"],
            weakref.ref(state),
            index,
        )
        _parts[id(param)] = weakref.ref(param, functools.partial(_forget, id(param))), part


def _forget(key: int, dead: weakref.ref[Tensor]) -> None:
    """Leaves an entry alone that another tensor has there by now."""
    if key in _parts and _parts[key][0] is dead:
        del _parts[key]


def part_of(param: Tensor) -> Part | None:
    """The part of a parameter that FSDP has wrapped, sharded or not; None for any other tensor."""
    entry = _parts.get(id(param))
    return entry[1] if entry is not None and entry[0]() is param else None
