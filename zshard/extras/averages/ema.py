"""zshard.EMA: exponential moving averages of a sharded model's weights, kept as shards.

    ema = zshard.EMA(model, 0.999)
    for batch in batches:
        loss_of(model, batch).backward()
        optimizer.step()
        ema.update()
    with ema.swapped():
        evaluate(model)

An average is stored with its parameter as an optimizer's state is (optim/sharded_state.py), and
one call in C moves all of them (csrc/optim/average.h): no rank communicates, and no Python runs per
parameter. Only swapped() and what stands on it are collective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zshard import api
from zshard.api import (
    PublicCall,
    bare,
    check_agreement,
    comm_of,
    may_stay_open,
    on_all_ranks,
    plain,
    refuse,
    reshard_all,
    session,
    units_of,
    zeros_side_by_side,
)

__all__ = ["EMA"]

_MOST = 8  # averages of a parameter (csrc/optim/average.h)
_IN_C = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class EMA:
    """Exponential moving averages of the trainable parameters of an FSDP(...) model.

    Each takes one shard: float32 (float64 for such parameters), also of parameters in lower
    precision, on the parameter's device; on the disk where optimizer state is offloaded. The first
    update copies the parameters; each further one is average.lerp_(parameter, 1 - decay), with
    torch's bits, as in torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(). Before the
    first update the average is the model. Buffers and frozen parameters are not averaged: they are
    the model's.

    Args:
        model: a model with FSDP modules. It is kept alive.
        decay: a number between 0 and 1, or up to 8 of them, for as many averages.
        every: average at every so many calls of update().
        warmup: use min(decay, (1 + n) / (10 + n)) after n updates, which forgets the first steps
            sooner: the formula of TensorFlow's tf.train.ExponentialMovingAverage(num_updates=n).

    Raises TypeError if `model` is not a module; ValueError for numbers out of range, for a model
    without FSDP modules or trainable parameters; NotImplementedError in a kept run (zshard.Keep),
    whose recovery does not know averages.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float | Sequence[float],
        *,
        every: int = 1,
        warmup: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"EMA(): model must be an nn.Module, got {type(model).__name__}")
        self.decays = _checked(decay)
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a number of update() calls from 1 on, got {every!r}")
        self.model = bare(model)
        states = [state for _, state in units_of(self.model)]
        if not states:
            text = f"EMA() expects a model with FSDP modules, got {type(model).__name__}"
            raise ValueError(f"{text}: make it after FSDP(...), or use torch's AveragedModel")
        if api.keeps_memory():
            raise NotImplementedError("a kept run cannot restore averages: run it without --keep")
        self._comm, self._states = comm_of(self.model), states
        self._every, self._warmup = every, warmup
        self.calls = 0  # of update()
        self.updates = 0  # of the averages
        self.params = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        """By name; tied ones once."""
        if not self.params:
            raise ValueError("EMA() found no trainable parameters: unfreeze some before EMA(...)")
        self.averages = [self._zeros() for _ in self.decays]
        """For each decay, this rank's elements of each parameter's average."""
        chosen = list(self.params.values())
        self._in_c = all(p.device.type == "cpu" and p.dtype in _IN_C for p in chosen)

    def _zeros(self) -> list[Tensor]:
        averages: dict[int, Tensor] = {}
        dtypes: dict[torch.dtype, list[Tensor]] = {}
        for param in self.params.values():
            dtypes.setdefault(torch.promote_types(param.dtype, torch.float32), []).append(param)
        for dtype, same in dtypes.items():
            averages |= zip(map(id, same), zeros_side_by_side(same, dtype), strict=True)
        return [averages[id(param)] for param in self.params.values()]

    # --- each step --------------------------------------------------------------------------------

    def update(self) -> None:
        """Move the averages towards the parameters, at every so many calls. Call it on all ranks
        after the optimizer's step; it does not communicate.

        Raises RuntimeError within swapped(), in a forward or backward, and if a parameter's shape
        or dtype was changed; OSError if a disk with offloaded averages fails.
        """
        refuse(self._states[:1], "update the averages", api.REPLACED, api.PASS)
        if api.has_held_units():  # a rank that has all of a parameter would not notice
            refuse(self._states, "update the averages", api.UNSHARDED)
        if (self.calls + 1) % self._every == 0:
            most = (1 + self.updates) / (10 + self.updates) if self._warmup else 1.0
            weights = [1 - min(decay, most) for decay in self.decays]
            if self.updates == 0:
                self._copy()
            elif not self._in_c or not api.average([*self.params.values()], self.averages, weights):
                self._move(weights)
            self.updates += 1
        self.calls += 1

    @torch.no_grad()
    @plain()
    def _copy(self) -> None:
        reshard_all(self.model, "update the averages")
        for averages in self.averages:
            torch._foreach_copy_(averages, list(self.params.values()))

    @torch.no_grad()
    @plain()
    def _move(self, weights: list[float]) -> None:
        """Move the averages on GPUs, or where a forward has left parameters unsharded."""
        reshard_all(self.model, "update the averages")
        params: list[Tensor] = list(self.params.values())
        if not self._in_c:
            for averages, weight in zip(self.averages, weights, strict=True):
                pairs = zip(params, averages, strict=True)
                ends = [param.detach().to(average.dtype) for param, average in pairs]
                torch._foreach_lerp_(averages, ends, weight)
        elif not api.average(params, self.averages, weights):
            text = "a parameter's shape, strides, dtype or device was changed since EMA(...)"
            raise RuntimeError(f"{text}: make the EMA after such changes")

    # --- use --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    @may_stay_open
    def swapped(self, decay: float | None = None) -> Iterator[None]:
        """Context manager in which the model's parameters are the average, in their own dtypes. At
        the end, also after an exception, parameters and buffers are what they were before.

        Collective: enter and leave it on all ranks. Within it, one rank may evaluate alone where it
        may do so elsewhere, and model.state_dict() and zshard.save(path, model) export the average;
        what is written to parameters is lost. Takes memory for this rank's parameters once more.

        decay: which average, of several.

        Raises ValueError for a decay that is not the EMA's; RuntimeError within another swapped(),
        during forward or backward, and if parameters were replaced or unfrozen since EMA(...);
        DivergenceError if ranks have not made the same updates. Within it an optimizer's step, a
        load, update(), and zshard.save() with an optimizer or an EMA raise RuntimeError.
        """
        if decay not in (*self.decays, None) or (decay is None and len(self.decays) > 1):
            raise ValueError(f"decay must be one of the EMA's, {self.decays}, got {decay!r}")
        averages = self.averages[0 if decay is None else self.decays.index(decay)]
        with PublicCall("ema.swapped()"):
            self.check_ranks()
            with on_all_ranks(self._comm):
                refuse(self._states[:1], "enter it again", api.REPLACED)
                self.prepare("average")
                live = _Live(self.model, list(self.params.values()), averages)
            try:
                live.swap()
                self._barrier(live)
            except BaseException:
                live.restore()
                raise
        of_ranks = (api.PeerError, api.DivergenceError)
        body: BaseException | None = None
        try:
            yield
        except BaseException as error:
            body = error
            raise
        finally:
            # The error of the body comes first. After one of these, other ranks do not meet here.
            meets = not isinstance(body, of_ranks)
            with PublicCall("ema.swapped()"), contextlib.suppress(*(of_ranks if body else ())):
                try:
                    if meets:
                        self._barrier(live)
                finally:
                    live.restore()
                if meets:
                    self._barrier(live)  # a backward may read peers' shards at once
                    self._gather_kept()

    def state_dict(self, decay: float | None = None) -> dict[str, Any]:
        """Return model.state_dict() with the average in place of the parameters: full tensors in
        the parameters' dtypes, which load into the plain model. Collective. Arguments and errors
        are those of swapped()."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        with self.swapped(decay):
            state: dict[str, Any] = self.model.state_dict()
            live = {tensor.untyped_storage()._cdata for tensor in tensors}
            for name, value in state.items():
                if isinstance(value, Tensor) and value.untyped_storage()._cdata in live:
                    state[name] = value.clone()
        return state

    def prepare(self, to: str) -> None:
        """Bring the model and the averages to their state between steps, to swap or to save them.
        Raises RuntimeError where swapped() does."""
        reshard_all(self.model, to)
        ids, now = set(map(id, self.params.values())), dict(self.model.named_parameters())
        changed = [name for name, param in self.params.items() if now.get(name) is not param]
        changed += [n for n, param in now.items() if param.requires_grad and id(param) not in ids]
        if changed:
            text = f"parameter '{changed[0]}' was removed, replaced or unfrozen since EMA(...)"
            raise RuntimeError(f"{text}: make the EMA after such changes")
        if self.updates == 0:
            self._copy()

    def check_ranks(self) -> None:
        """Raise DivergenceError unless all ranks have made the same updates. Collective."""
        facts = [("decay", str(self.decays)), ("the number of update() calls", str(self.calls))]
        facts.append(("the number of updates", str(self.updates)))
        check_agreement(self._comm, facts, "EMAs")

    def _barrier(self, live: _Live) -> None:
        """Wait for all ranks: none of them writes or reads before the others have come here."""
        for engine in live.engines:
            engine.note_barrier()
        self._comm.exchange(b"\0")

    def _gather_kept(self) -> None:
        """Bring what a forward has kept for its backward to the restored values. Collective."""
        kept = [s.unit for _, s in units_of(self.model) if s.options.strategy.has_secondary]
        with session(kept):
            for unit in kept:
                unit.unshard()
                unit.reshard()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("an EMA cannot be copied or pickled: save it by zshard.save(..., ema=ema)")


class _Live:
    """The values of a model that an average replaces for a while."""

    def __init__(
        self, model: nn.Module, params: list[nn.Parameter], averages: list[Tensor]
    ) -> None:
        self._params, self._averages = params, averages
        self._states = [state for _, state in units_of(model)]
        self.engines = {state.unit.engine for state in self._states}
        with torch.no_grad(), plain():
            self._values = [param.detach().clone() for param in params]
            self._buffers = [
                (module._buffers, name, buffer, buffer.detach().clone())
                for module in model.modules()
                for name, buffer in module._buffers.items()
                if buffer is not None
            ]
        self._versions = [param._version for param in params]

    def swap(self) -> None:
        """Write the average to the parameters."""
        for state in self._states:
            state.model.replaced = "ema.swapped()"
        self._write(self._averages)

    def restore(self) -> None:
        """Undo it in any case. For autograd, nothing was written."""
        for state in self._states:
            state.model.replaced = ""
        try:
            with contextlib.ExitStack() as ends:  # also if a unit refuses what was written to it
                ends.callback(self._write, self._values)
                for state in self._states:  # a forward has kept it for a backward, or unshard()
                    ends.callback(state.unit.unpin, True)
        finally:
            versions = torch._C._autograd._unsafe_set_version_counter
            versions(tuple(self._params), tuple(self._versions))
            with torch.no_grad():
                for places, name, buffer, value in self._buffers:
                    buffer.copy_(value)
                    places[name] = buffer

    @torch.no_grad()
    @plain()
    def _write(self, values: list[Tensor]) -> None:
        """Write while no peer reads; also if a peer is lost, which raises."""
        try:
            for engine in self.engines:
                engine.begin_write()
        finally:
            torch._foreach_copy_([param.detach() for param in self._params], values)
            for engine in self.engines:
                engine.end_write()


def _checked(decay: float | Sequence[float]) -> tuple[float, ...]:
    decays: tuple[Any, ...] = (decay,) if isinstance(decay, int | float | str) else tuple(decay)
    are_right = all(isinstance(number, float) and 0 < number < 1 for number in decays)
    if not are_right or len({*decays}) != len(decays) or not 0 < len(decays) <= _MOST:
        numbers = f"a number between 0 and 1, or up to {_MOST} different ones"
        raise ValueError(f"decay must be {numbers}, got {decay!r}")
    return tuple(map(float, decays))  # NumPy's have another repr(), which names files
