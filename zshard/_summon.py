"""Whole parameters by hand, to read or to write: FSDP1's summon_full_params, and apply().

The one idea: each rank gets a copy of the units' whole parameters, and if wanted of their
gradients; in the end it keeps its slice of what has become of them. So all ranks have to write the
same, as they do to the parameters of a plain model under DDP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from zshard._units import State, state_of, units_of
from zshard._values import take_from_rank_0
from zshard._whole_grads import WholeGrads


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Context in which the parameters of `module` are whole, in their own dtype and shape.

    recurse: those of all units at and below `module`; else those of its own unit.
    writeback: what is written to them counts: each rank keeps its slice. Else it is dropped.
    rank0_only: only rank 0 has them (the others take part); not with writeback.
    offload_to_cpu: has no effect on CPU ranks.
    with_grads: their `.grad`s are whole, too, and what is written to those, or put in their place,
        counts or is dropped likewise. None stays None, unless some rank has a gradient: the others'
        parts are zeros then. A `.grad` that no_sync() has kept on its rank is whole already, and
        stays that rank's own.

    For all ranks together, outside of forward and backward; takes memory for the whole parameters,
    and gradients. Raises ValueError for rank0_only with writeback, RuntimeError in a backward, and
    for a gradient that only some ranks have kept in no_sync().
    """
    if rank0_only and writeback:
        raise ValueError("rank0_only needs writeback=False: other ranks have nothing to write back")
    states = [state for each, state in units_of(module) if recurse or each is module]
    before = [] if writeback else _values(states)
    held: list[State] = []
    grads: list[WholeGrads] = []
    try:
        if with_grads:
            grads += [WholeGrads(state) for state in states]
            for each in grads:
                each.gather()
        for state in states:
            if not state.unit.hold(True):
                continue
            if rank0_only and state.comms.all.rank != 0:
                state.unit.let_go(False)
            else:
                held.append(state)
        for each in grads:
            each.show()
        yield
    finally:
        for each in grads:
            each.take(writeback)
        for state in held:
            state.unit.let_go(writeback)
        with torch.no_grad():
            for each in grads:
                each.give_back(writeback)
            for param, value in before:
                param.copy_(value)


def _values(states: list[State]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of parameters that are whole at all times, what they are now."""
    return [
        (param, param.detach().clone())
        for state in states
        if state.unit.is_full
        for param in state.unit.params
    ]


@contextlib.contextmanager
def own_unit_as_on_rank_0(module: nn.Module) -> Iterator[None]:
    """Context in which the parameters of the unit of `module` are whole; what rank 0 has made of
    them in the end is what all ranks have."""
    unit, comm = state_of(module).unit, state_of(module).comms.all
    with summon_full_params(module, recurse=False):
        yield
        for param in unit.params if comm.world > 1 else ():
            take_from_rank_0(comm, param.detach())
