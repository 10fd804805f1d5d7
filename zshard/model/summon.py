"""Read or write full parameters: what summon_full_params() and apply() do.

Each rank gets a copy of the units' full parameters, and optionally of their
gradients; on exit it keeps its shard of the modified copy. So all ranks must write the same values,
as they do to the parameters of a plain model under DDP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from zshard import _core
from zshard.model.whole_grads import WholeGrads
from zshard.optim.step_digest import sum_of_bits
from zshard.units.units import State, state_of, units_of
from zshard.wrap.initial_values import take_from_rank_0


@contextlib.contextmanager
def full_params(
    states: list[State], writeback: bool = True, rank0_only: bool = False, with_grads: bool = False
) -> Iterator[None]:
    """Context manager that unshards the parameters of these units, in their original shape and
    dtype. Collective; use it outside forward and backward.

    writeback: keep what is written, else discard it. rank0_only: unshard on rank 0 only.
    with_grads: unshard `.grad` as well.
    """
    before = [] if writeback else _values(states)
    versions = [] if writeback else _versions(states)
    held: list[State] = []
    grads: list[WholeGrads] = []
    try:
        if with_grads:
            grads += [WholeGrads(state) for state in states]
            for each in grads:
                each.gather()
        for state in states:
            if not state.unit.pin(True):
                continue
            if rank0_only and state.comms.all.rank != 0:
                state.unit.unpin(False)
            else:
                held.append(state)
        for each in grads:
            each.show()
        yield
    finally:
        for each in grads:
            each.take(writeback)
        for state in states if writeback else ():
            _note_values(state)
        for state in held:
            state.unit.unpin(writeback)
        with torch.no_grad():
            for each in grads:
                each.give_back(writeback)
            for param, value in before:
                param.copy_(value)
        _set_versions(versions)


def _note_values(state: State) -> None:
    """Note a digest of the unit's full parameters, which ranks compare where they meet next. Each
    rank keeps its shard of what it has written itself: other values on one rank would leave a
    mixture of both, and replicas that differ."""
    if state.unit.is_full and state.comms.all.world > 1:
        for index, param in enumerate(state.unit.params):
            state.unit.note_draw(index, sum_of_bits(param))


def _values(states: list[State]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the current values of parameters that stay unsharded: those that are never sharded,
    and those that unshard() or an enclosing context has gathered."""
    return [
        (param, param.detach().clone())
        for state in states
        if state.unit.is_full and (state.unit.replicated or _is_pinned(state))
        for param in state.unit.params
    ]


def _is_pinned(state: State) -> bool:
    return any(_core.held_unit(param) is not None for param in state.unit.params[:1])


def _versions(states: list[State]) -> list[tuple[torch.Tensor, int]]:
    """Return the parameters with autograd's counters of in-place writes: what is written and undone
    before a backward is no write to it."""
    params = [param for state in states for param in state.unit.params]
    return [(param, param._version) for param in params if not param.is_inference()]


def _set_versions(versions: list[tuple[torch.Tensor, int]]) -> None:
    for param, version in versions:
        torch._C._autograd._unsafe_set_version_counter((param,), (version,))


@contextlib.contextmanager
def own_unit_as_on_rank_0(module: nn.Module) -> Iterator[None]:
    """Context manager that unshards the unit of `module`; on exit all ranks get rank 0's values."""
    state = state_of(module)
    comm = state.comms.all
    with full_params([state]):
        yield
        for param in state.unit.params if comm.world > 1 else ():
            take_from_rank_0(comm, param.detach())


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Context manager that unshards the parameters of `module`, in their original shape and dtype.

    Collective; use it outside forward and backward. Takes memory for the full parameters, and with
    `with_grads` for the full gradients.

    Args:
        module: a sharded module, or one that contains sharded modules.
        recurse: include all units at and below `module`; else only its own.
        writeback: keep changes: on exit each rank keeps its shard of what was written. Write the
            same values on all ranks, else the next forward or round of gradients raises
            DivergenceError. False discards changes.
        rank0_only: unshard on rank 0 only (other ranks still take part). Requires writeback=False.
        offload_to_cpu: accepted for compatibility; no effect.
        with_grads: also unshard `.grad`, and keep or discard what is written or assigned to it. A
            rank without a gradient contributes zeros; `.grad` is None if no rank has one. A `.grad`
            accumulated within no_sync() is unsharded already and stays local to its rank.

    Raises ValueError for rank0_only with writeback; RuntimeError during a backward, and if only
    some ranks have accumulated a gradient within no_sync().
    """
    if rank0_only and writeback:
        raise ValueError("rank0_only=True requires writeback=False")
    states = [state for each, state in units_of(module) if recurse or each is module]
    with full_params(states, writeback, rank0_only, with_grads):
        yield
