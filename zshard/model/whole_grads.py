"""Full gradients of a unit, for summon_full_params(with_grads=True).

Ranks first exchange which gradients and which shards they have, and then each sends
its shards in turn. A parameter's own `.grad`, a view of the grad shard, is set aside meanwhile and
restored with this rank's shard of the modified full gradient.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from zshard import _core
from zshard.guard.slices import plain
from zshard.units.units import State

_NONE, _SLICE, _LOCAL = range(3)
_FACT = struct.Struct("<Bqq")  # kind, begin and numel of the slice
_FACTS = 4096 // _FACT.size  # in one exchange


class _GradShare(NamedTuple):
    """A rank's share of a parameter's gradient."""

    kind: int
    begin: int
    numel: int


class WholeGrads:
    """The gradients of one unit: gather(), then show(); finally take(), then give_back()."""

    @plain()
    def __init__(self, state: State) -> None:
        self._state = state
        self._unit = state.unit
        self._comm = state.comms.shards
        self._params = list(self._unit.params)
        self._own = [param.grad for param in self._params]
        self._before: dict[int, Tensor] = {}  # of those that are whole anyway: values to restore
        self._whole: dict[int, Tensor | None] = {}
        self._shown = False

    @plain()
    def gather(self) -> None:
        """Gather full copies; nothing is changed yet. Collective. Raises RuntimeError on all ranks
        if a gradient is local on some of them only."""
        if self._state.whole_grads:  # within another such context
            return
        kinds = [self._kind(grad) for grad in self._own]
        for index, grad in enumerate(self._own):
            if grad is not None and (self._unit.replicated or kinds[index] == _LOCAL):
                self._before[index] = grad.detach().clone()
        if self._unit.replicated:
            return
        for index, parts in enumerate(self._exchange(kinds)):
            found = {part.kind for part in parts}
            if _LOCAL in found and len(found) > 1:
                raise RuntimeError(
                    f"some ranks, but not all, have an unreduced gradient of parameter "
                    f"'{self._unit.param(index)['name']}' from no_sync(): run the last backward "
                    "outside no_sync() first"
                )
            if found != {_LOCAL}:
                self._whole[index] = self._send(index, parts) if _SLICE in found else None

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
            assert grad is not None, "there was one to copy"
            grad.copy_(value)
            if self._params[index].grad is not grad:
                self._params[index].grad = grad
        for index in self._whole if self._shown else ():
            self._whole[index] = self._params[index].grad
            self._params[index].grad = None

    @plain()
    @torch.no_grad()
    def give_back(self, writeback: bool) -> None:
        """Restore the parameters' own gradients, with this rank's shards if `writeback`."""
        if self._shown:
            self._state.whole_grads = False
            for index, whole in self._whole.items():
                self._return(index, whole, writeback)

    def _return(self, index: int, whole: Tensor | None, writeback: bool) -> None:
        param, own = self._params[index], self._own[index]
        grad = None if writeback else own
        if writeback and whole is not None:
            fact = self._unit.param(index)
            part = whole.detach().reshape(-1)[fact["begin"] : fact["begin"] + fact["numel"]]
            grad = own if own is not None else torch.empty_like(param, requires_grad=False)
            grad.copy_(part.reshape(param.shape))
        param.grad = grad

    def _kind(self, grad: Tensor | None) -> int:
        if grad is None:
            return _NONE
        try:
            _core.grad_owner(grad)
        except RuntimeError:
            return _LOCAL
        return _SLICE

    def _exchange(self, kinds: list[int]) -> list[list[_GradShare]]:
        """Return what each rank has of each parameter's gradient."""
        facts = [self._unit.param(index) for index in range(len(self._params))]
        mine = [
            _FACT.pack(kind, fact["begin"], fact["numel"])
            for kind, fact in zip(kinds, facts, strict=True)
        ]
        found: list[list[_GradShare]] = []
        for first in range(0, len(mine), _FACTS):
            said = self._comm.exchange(b"".join(mine[first : first + _FACTS]))
            ranks = [[_GradShare(*fact) for fact in _FACT.iter_unpack(each)] for each in said]
            found += [list(parts) for parts in zip(*ranks, strict=True)]
        return found

    def _send(self, index: int, parts: list[_GradShare]) -> Tensor:
        """Return the full gradient of a parameter; zeros where a rank has none."""
        param, own = self._params[index], self._own[index]
        whole = torch.zeros(self._unit.param(index)["shape"], dtype=param.dtype)
        flat = whole.view(-1)
        for rank, part in enumerate(parts):
            if part.kind == _NONE or part.numel == 0:
                continue
            slice_ = flat[part.begin : part.begin + part.numel]
            if rank == self._comm.rank and own is not None:
                slice_.copy_(own.detach().reshape(-1))
            self._comm.broadcast(slice_, rank)
        return whole.to(param.device)
