"""Read or write full parameters: what summon_full_params() and apply() do.

Each rank gets a copy of the units' full parameters, and optionally of their
gradients; on exit it keeps its shard of the modified copy. So all ranks must write the same values,
as they do to the parameters of a plain model under DDP.

For gradients, ranks first exchange which they have, and then join the shards. A parameter's own
`.grad`, a view of the grad shard, is set aside and later restored with this rank's shard of the
modified full gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from zshard import _core
from zshard.guard.slices import plain
from zshard.guard.whole_values import joined
from zshard.optim.step_digest import sum_of_bits
from zshard.ranks.agreement import PublicCall, gather, take_from
from zshard.ranks.ends import may_stay_open
from zshard.units.extensions import refuse_writes
from zshard.units.moment import BACKWARD, refuse
from zshard.units.shards import part_of
from zshard.units.units import State, Summons, state_of, units_of, writing

_NONE, _SLICE, _LOCAL = range(3)


@contextlib.contextmanager
def full_params(
    states: list[State], writeback: bool = True, rank0_only: bool = False, with_grads: bool = False
) -> Iterator[None]:
    """Context manager that unshards the parameters of these units, in their original shape and
    dtype. Collective; use it outside forward and backward.

    writeback: keep what is written, else discard it. rank0_only: unshard on rank 0 only.
    with_grads: unshard `.grad` as well.
    """
    if any(each.rank0_only for state in states for each in state.summons):
        raise RuntimeError(
            "summon_full_params() and apply() need all ranks, but were called within "
            "summon_full_params(rank0_only=True): leave that context first"
        )
    for state in states:
        unit, name = state.unit, f"unit '{state.unit.name or '(root)'}'"
        if unit.is_running and not unit.replicated:
            raise RuntimeError(
                f"cannot summon the parameters of {name} in its own forward, where they are full: "
                "call summon_full_params() before or after it"
            )
        if with_grads and unit.is_pinned and not (unit.replicated or state.whole_grads):
            raise RuntimeError(
                f"cannot summon the gradients of {name}, whose parameters are unsharded already: "
                "pass with_grads=True to the first summon_full_params(), or call reshard() before"
            )
    if writeback:
        refuse(states, "write to full parameters", BACKWARD)
        units = (state.unit for state in states)
        refuse_writes(units, "unsharding parameters without writeback=False")
    undo = None if writeback else _undo_of(states)
    held: list[State] = []
    grads: list[_FullGrads] = []
    entered = False
    for state in states:
        state.summons.append(Summons(writeback, rank0_only))
    try:
        if with_grads:
            grads += [_FullGrads(state) for state in states]
            for each in grads:
                each.gather()
        for state in states:
            if not state.unit.pin(True):
                continue
            if rank0_only and state.comms.all.rank != 0:
                state.unit.unpin()
            else:
                held.append(state)
        for each in grads:
            each.show()
        entered = True
        yield
    finally:
        with contextlib.ExitStack() as ends:  # all of them, also if one fails
            for state in states:
                ends.callback(state.summons.pop)
            if undo is not None:
                ends.callback(undo)
            for each in grads:
                ends.callback(each.restore_own, writeback)
            for state in reversed(held):
                ends.callback(state.unit.unpin, True)
            for each in grads:
                each.take(writeback)
            if entered:  # else the full parameters may be those of unshard(), rounded on their way
                _write_back(states, held)


def _write_back(states: list[State], held: list[State]) -> None:
    """Keep this rank's shards of what was written, unless an enclosing context will keep or discard
    it. held: what this context unsharded."""
    outermost = [state for state in states if len(state.summons) == 1 or state in held]
    kept = [s for s in outermost if all(each.writeback for each in s.summons) and _is_open(s)]
    # Not in a forward, which a rank may run alone: it would wait for the others.
    with writing(s.unit for s in kept if s.unit.is_pinned or not s.unit.in_forward):
        for state in kept:
            _note_values(state)
            state.unit.accept()


def _is_open(state: State) -> bool:
    """Return whether a script can write to the unit's parameters now."""
    return state.unit.is_full and (state.unit.replicated or state.unit.is_pinned)


def _note_values(state: State) -> None:
    """Note a digest of the unit's full parameters, which ranks compare in their next collective:
    different values would leave a mixture. Call it within a write."""
    if state.comms.all.world > 1:
        for index, param in enumerate(state.unit.params):
            state.unit.note_draw(index, sum_of_bits(param))


def _undo_of(states: list[State]) -> Callable[[], None]:
    """Return a function that restores the current values of parameters that stay unsharded, and
    autograd's counters of writes of all: a write that is undone does not count."""
    params = [param for state in states for param in state.unit.params]
    versions = [(param, param._version) for param in params if not param.is_inference()]
    open_units = [state.unit for state in states if _is_open(state)]
    values = [(param, param.detach().clone()) for unit in open_units for param in unit.params]

    @torch.no_grad()
    def undo() -> None:
        for param, value in values:
            param.copy_(value)
        for param, version in versions:
            torch._C._autograd._unsafe_set_version_counter((param,), (version,))

    return undo


@contextlib.contextmanager
def own_unit_as_on_rank_0(module: nn.Module) -> Iterator[None]:
    """Context manager that unshards the unit of `module`; on exit all ranks get rank 0's values."""
    state = state_of(module)
    comm = state.comms.all
    with full_params([state]):
        yield
        with PublicCall("apply()"):
            for param in state.unit.params if comm.world > 1 else ():
                take_from(0, comm, param.detach())


@contextlib.contextmanager
@may_stay_open
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
            DivergenceError. False discards changes, also those that a context within this one
            would keep.
        rank0_only: unshard on rank 0 only (other ranks still take part). Requires writeback=False.
        offload_to_cpu: accepted for compatibility; no effect.
        with_grads: also unshard `.grad`, and keep or discard what is written or assigned to it. A
            rank without a gradient contributes zeros; `.grad` is None if no rank has one. A `.grad`
            accumulated within no_sync() is unsharded already and stays local to its rank.

    Raises ValueError for rank0_only with writeback; RuntimeError during a backward, if only some
    ranks have accumulated a gradient within no_sync(), and for with_grads where the parameters are
    unsharded already, without their gradients.
    """
    if rank0_only and writeback:
        raise ValueError("rank0_only=True requires writeback=False: pass both")
    states = [state for each, state in units_of(module) if recurse or each is module]
    with full_params(states, writeback, rank0_only, with_grads):
        yield


class _FullGrads:
    """The full gradients of one unit: gather(), then show(); finally take(), then restore_own()."""

    @plain()
    def __init__(self, state: State) -> None:
        self._state = state
        self._unit = state.unit
        self._params = list(self._unit.params)
        self._own = [param.grad for param in self._params]
        for grad in self._own:
            if grad is not None:
                _core.apply_pending(grad, True)
        self._before: dict[int, Tensor | None] = {}  # to restore, of gradients that are full anyway
        self._whole: dict[int, Tensor | None] = {}
        self._shown = False

    @PublicCall("summon_full_params()")
    @plain()
    def gather(self) -> None:
        """Gather full copies without changing anything yet. Collective. Raises RuntimeError on all
        ranks if a gradient is local on some of them only."""
        if self._state.whole_grads:  # within another such context
            return
        kinds = [self._kind(grad) for grad in self._own]
        for index, grad in enumerate(self._own):
            if self._unit.replicated or kinds[index] == _LOCAL:
                self._before[index] = None if grad is None else grad.detach().clone()
        if self._unit.replicated:
            return
        everyone = gather(self._state.comms.all, kinds)
        for index, found in enumerate(map(set, zip(*everyone, strict=True))):
            if _LOCAL in found and len(found) > 1:
                raise RuntimeError(
                    f"some ranks, but not all, have an unreduced gradient of parameter "
                    f"'{self._unit.param(index)['name']}' from no_sync(): run the last backward "
                    "outside no_sync() first"
                )
            if found != {_LOCAL}:
                self._whole[index] = self._joined(index) if _SLICE in found else None

    def _joined(self, index: int) -> Tensor:
        """Return the full gradient of a parameter; zeros where a rank has none."""
        param, own = self._params[index], self._own[index]
        part = part_of(param)
        assert part is not None, "it is in a unit"
        return joined(param.new_zeros(part.numel) if own is None else own, part)

    @plain()
    def show(self) -> None:
        """Assign the full gradients to `.grad`, where the parameters are unsharded."""
        self._shown = not self._state.whole_grads and bool(self._params) and self._unit.is_full
        if not self._shown:
            self._whole.clear()
            return
        self._state.whole_grads = True
        for index, whole in self._whole.items():
            self._params[index].grad = whole

    @plain()
    @torch.no_grad()
    def take(self, writeback: bool) -> None:
        """Remove the full gradients before parameters are resharded. Gradients that were full
        anyway are restored unless `writeback`."""
        for index, value in self._before.items() if not writeback else ():
            grad = self._own[index]
            if grad is not None and value is not None:
                grad.copy_(value)
            if self._params[index].grad is not grad:
                self._params[index].grad = grad
        for index in self._whole if self._shown else ():
            self._whole[index] = self._params[index].grad
            self._params[index].grad = None

    @plain()
    @torch.no_grad()
    def restore_own(self, writeback: bool) -> None:
        """Restore the parameters' own gradients, with this rank's shards if `writeback`."""
        if self._shown:
            self._state.whole_grads = False
            for index, whole in self._whole.items():
                param, own = self._params[index], self._own[index]
                grad, part = None if writeback else own, part_of(param)
                if writeback and whole is not None and part is not None:
                    grad = own if own is not None else torch.empty_like(param, requires_grad=False)
                    grad.copy_(part.of(whole.detach()))
                param.grad = grad

    def _kind(self, grad: Tensor | None) -> int:
        if grad is None:
            return _NONE
        try:
            _core.grad_owner(grad)
        except RuntimeError:
            return _LOCAL
        return _SLICE
