"""Whole parameters by hand, to read or to write: FSDP1's summon_full_params, and apply().

The one idea: each rank gets a copy of the units' whole parameters; in the end it keeps its slice of
what has become of it. So all ranks have to write the same, as they do to the parameters of a plain
model under DDP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from zshard._units import State, state_of, units_of
from zshard._values import take_from_rank_0


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

    For all ranks together, outside of forward and backward; takes memory for the whole parameters.
    Raises NotImplementedError for with_grads, ValueError for rank0_only with writeback,
    RuntimeError in a backward.
    """
    if with_grads:
        raise NotImplementedError(
            "summon_full_params(with_grads=True) is not in this version of zshard; within "
            "no_sync() a .grad is whole"
        )
    if rank0_only and writeback:
        raise ValueError("rank0_only needs writeback=False: other ranks have nothing to write back")
    states = [state for each, state in units_of(module) if recurse or each is module]
    before = [] if writeback else _values(states)
    held: list[State] = []
    try:
        for state in states:
            if not state.unit.hold(True):
                continue
            if rank0_only and state.comms.all.rank != 0:
                state.unit.let_go(False)
            else:
                held.append(state)
        yield
    finally:
        for state in held:
            state.unit.let_go(writeback)
        with torch.no_grad():
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
