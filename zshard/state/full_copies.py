"""The full copies of parameters that one call of state_dict() makes.

What an owner's attribute refers to is a place, of which a copy or this rank's shard
can be had. The first copy of a unit gathers the unit, for all places that the call is about.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import nn

from zshard import _core
from zshard.guard.slices import plain
from zshard.state.shard_records import ShardRecord, record_of
from zshard.units.units import State, unsharded, without_memory


class UnitParams:
    """The parameters of one sharded unit. It holds no module: a part of a model that lives on
    keeps the unit whose memory it lies on, and no other modules."""

    def __init__(self, state: State, params: list[nn.Parameter]) -> None:
        self.state = state
        self.unit = state.unit
        self.params = params

    def copies(self, wanted: Collection[int], keep: bool) -> dict[int, nn.Parameter]:
        """Return full copies of the parameters whose id is wanted, by id. Collective: one gather.
        keep: else they have shapes only."""
        with unsharded(self.unit):
            chosen = [(i, p) for i, p in enumerate(self.params) if id(p) in wanted]
            return {id(param): self._copy(i, param, keep) for i, param in chosen}

    def _copy(self, index: int, param: nn.Parameter, keep: bool) -> nn.Parameter:
        shape = self.unit.param(index)["shape"]
        if not keep:
            return without_memory(param, shape, param.device)
        with torch.inference_mode(False):  # whoever gets it may write to it
            data = torch.empty(shape, dtype=param.dtype, device=param.device)
            self.unit.read_param(index, data)
            return like(param, data)


@dataclass(eq=False, frozen=True)
class Place:
    """What one attribute of an owner refers to: the parameter `index` of a unit."""

    params: UnitParams
    index: int

    @property
    def unit(self) -> _core.Unit:
        return self.params.unit

    @property
    def param(self) -> nn.Parameter:
        return self.params.params[self.index]

    @property
    def name(self) -> str:
        return str(self.unit.param(self.index)["name"])

    @property
    def shape(self) -> tuple[int, ...]:
        """The full shape."""
        return tuple(self.unit.param(self.index)["shape"])

    @property
    def record(self) -> ShardRecord:
        return record_of(self.params.state, self.index)

    @property
    def wants_slices(self) -> bool:
        """Whether state dicts currently contain this rank's shards."""
        return self.params.state.form.slices

    @plain()
    def slice(self) -> nn.Parameter:
        """Return a 1-D copy of this rank's shard. Raises RuntimeError if the script has unsharded
        the unit."""
        if self.unit.is_full:
            if _core.held_unit(self.param) is not None:
                raise RuntimeError(
                    f"parameter '{self.name}' is unsharded: call state_dict() after reshard(), and "
                    "outside summon_full_params(), to get shards"
                )
            self.unit.reshard()
        return like(self.param, self.param.detach().reshape(-1).clone())


class FullCopies:
    """The full copies that one call of state_dict() has made. Tied parameters share theirs.

    All are of one step, also where other ranks train on: the first one begins a session. A call
    that makes none, such as that of zshard.save(), waits for nobody.
    """

    def __init__(
        self, params: Iterator[nn.Parameter], begin: Callable[[], object], keep: bool = True
    ) -> None:
        self._below = {id(param) for param in params}  # of a unit, what the call is about
        self._begin = begin
        self._keep = keep
        self._made: dict[int, nn.Parameter] = {}

    def of(self, place: Place) -> nn.Parameter:
        """Return the copy of a parameter; the first one of a unit gathers it."""
        key = id(place.param)
        if not self._made:
            self._begin()
        if key not in self._made:
            self._made.update(place.params.copies(self._below | {key}, self._keep))
        return self._made[key]


current_copies: ContextVar[FullCopies | None] = ContextVar("zshard_state_dict", default=None)
"""Those of the call that is running, if one is."""


def like(param: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """Return a parameter on `data` with `param`'s other properties and attributes."""
    made = nn.Parameter(data, requires_grad=param.requires_grad)
    vars(made).update(vars(param))
    return made
