"""model.join(...): continue to train when some ranks have fewer batches than others.

A rank whose data has ended stays at the end of the with block and follows the others: the core runs
their passes without modules (csrc/engine/join_follow.c). What the others do between passes (a step,
clipping, unscaling) the core announces to this extra before it happens; a rank without data
receives it, and does the same on its shard, with their values. So its shard, its optimizers' state
and its settings are always as if it had data whose gradients are zero.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zshard import api
from zshard.api import (
    EXTENSIONS,
    Extension,
    GradScaler,
    PublicCall,
    check_agreement,
    grads_of,
    is_stepped_in_backward,
    is_unit,
    may_stay_open,
    on_all_ranks,
    part_of,
    state_of,
    states_stepped_by,
    take_from,
    units_of,
    units_stepped_by,
)

_LONGEST = 200  # characters of an exception that the other ranks get

_ACTS = {  # what is announced, and how: a rank without data gets the place in this table
    "step": "in an optimizer's step()",
    "zero": "in zero_grad(set_to_none=False)",
    "norm": "computing a norm of gradients",
    "clip": "clipping gradients",
    "unscale": "unscaling gradients",
    "rescale": "changing the scale of losses",
}

_STEP_ATTRIBUTES = ("grad_scale", "found_inf")
"""What torch's GradScaler sets on an optimizer for the time of a step."""


@contextlib.contextmanager
@may_stay_open
def join(model: nn.Module, objects: Sequence[Any], by_all: bool, throws: bool) -> Iterator[None]:
    """See FSDP.join()."""
    if not is_unit(model):
        raise TypeError(f"join() expects a sharded model, got {type(model).__name__}: call FSDP()")
    comm = state_of(model).comms.all
    with PublicCall("join()"):
        with on_all_ranks(comm):
            optimizers, others = _sorted(model, objects)
            _check_model(model)
        kinds = [", ".join(type(x).__name__ for x in xs) or "none" for xs in (optimizers, others)]
        facts = [("the list of optimizers", kinds[0]), ("the list of other objects", kinds[1])]
        facts += [("divide_by_initial_world_size", str(by_all))]
        facts += [("throw_on_early_termination", str(throws))]
        check_agreement(comm, facts, "arguments of join()")
    joined = _Joined(model, optimizers, others)
    joined.engine.join_begin(by_all, throws)
    _live[joined.engine] = joined
    for optimizer in optimizers:
        optimizer.zero_grad = functools.partial(_zero_grad, optimizer)  # type: ignore[method-assign]
    try:
        try:
            yield
            with PublicCall("join()"):
                joined.follow()
        except (api.PeerError, api.PeerTimeoutError):
            raise  # no rank can receive it
        except BaseException as error:
            if not joined.is_over:
                joined.engine.join_leave(f"{type(error).__name__}: {error}"[:_LONGEST])
            raise
    finally:
        _live.pop(joined.engine, None)
        for optimizer in optimizers:
            vars(optimizer).pop("zero_grad", None)
        joined.engine.join_end()


# --- arguments ------------------------------------------------------------------------------------


def _sorted(
    model: nn.Module, objects: Sequence[Any]
) -> tuple[list[torch.optim.Optimizer], list[Any]]:
    """Return the optimizers, and the other objects whose state follows."""
    optimizers: list[torch.optim.Optimizer] = []
    others: list[Any] = []
    engine = state_of(model).unit.engine
    for each in objects:
        name = type(each).__name__
        has_state = hasattr(each, "state_dict") and hasattr(each, "load_state_dict")
        if any(each is other for other in (*optimizers, *others)):
            raise ValueError(f"join() got the same {name} twice: pass it once")
        if isinstance(each, torch.optim.Optimizer):
            if all(unit.engine != engine for unit in units_stepped_by(each)):
                raise ValueError(f"join() got {name} without a parameter of this model: omit it")
            optimizers.append(each)
        elif not has_state or isinstance(each, nn.Module):
            raise TypeError(f"join() expects optimizers, schedulers and grad scalers, got {name}")
        else:
            others.append(each)
    return optimizers, others


def _check_model(model: nn.Module) -> None:
    state = state_of(model)
    if state.unit.name:
        raise ValueError(f"join() was called on unit '{state.unit.name}', not the model")
    is_apart = any(of_unit.is_apart(state.comms) for _, of_unit in units_of(model))
    for what, is_there in (
        ("units with process groups of other ranks: give all ranks as many batches", is_apart),
        ("deterministic='any-world': omit join()", state.options.micro_batches),
        ("optimizer_in_backward(): call remove() on its handle", is_stepped_in_backward(model)),
    ):
        if is_there:
            raise NotImplementedError(f"join() does not support {what}")
    if state.unit.engine.join_news() is not None:
        raise RuntimeError("join() is already active on this model: leave it first")


# --- a model within join() ------------------------------------------------------------------------


class _Joined:
    """A model within join(), on this rank. others: schedulers and grad scalers."""

    def __init__(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], others: list[Any]
    ) -> None:
        self.engine = state_of(model).unit.engine
        self.follows = False  # this rank has no more data
        self.is_over = False  # all ranks' data has ended
        self._model = model
        self._params: list[Tensor] = list(model.parameters())
        self._is_sharded = [part_of(param) is not None for param in self._params]
        self._optimizers, self._others = optimizers, others

    def _share(self, value: object) -> Any:
        """Return the leading rank's value. Collective."""
        file = io.BytesIO()
        _Pickler(file).dump(value)
        return pickle.loads(self.engine.join_share(file.getvalue()))

    # --- a rank with data announces ---------------------------------------------------------------

    def _say(self, act: str, what: int | list[int], *values: object, meetings: int = 0) -> None:
        """Announce a call; ranks without data get the values of the lowest rank with data.

        what: the index of the optimizer that makes the call, or the parameters that it changes.
        """
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(f"a hook was {_ACTS[act]} within a backward: do it after backward")
        number = what if isinstance(what, int) else 0
        code = 1 + list(_ACTS).index(act) + len(_ACTS) * number
        if self.engine.join_call(code, f"{_ACTS[act]}{f' #{number}' if number else ''}", meetings):
            held = [grad is not None for grad in grads_of(self._params)]
            self._share((act, (what, held, *values)))

    def _number_of(self, optimizer: torch.optim.Optimizer) -> int | None:
        """Return the index of this optimizer; None if it does not step the model. Raises
        RuntimeError for one that was not passed."""
        if all(unit.engine != self.engine for unit in units_stepped_by(optimizer)):
            return None
        for number, each in enumerate(self._optimizers):
            if each is optimizer:
                return number
        name = type(optimizer).__name__
        raise RuntimeError(f"join() did not get {name}: pass it, as in model.join(optimizer)")

    def say_step(self, optimizer: torch.optim.Optimizer, is_first: bool) -> None:
        """A step is about to change parameters."""
        number = self._number_of(optimizer)
        if number is None:
            return
        extra = {name: getattr(optimizer, name, None) for name in _STEP_ATTRIBUTES}
        meets = getattr(optimizer, "steps_together", False) or any(
            each.meets_before_step(states_stepped_by(optimizer)) for each in EXTENSIONS
        )
        meetings = -1 if meets or is_first else 0  # any number
        self._say("step", number, _options_of(optimizer), extra, meetings=meetings)

    def say_zero(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients are about to be set to zero in place."""
        number = self._number_of(optimizer)
        if number is not None:
            self._say("zero", number)

    def say_norm(self, engine: Any, grads: list[Tensor], norm_type: float) -> None:
        """All ranks are about to exchange their shares of a norm of these gradients."""
        if engine != self.engine:
            return
        numbers = {id(grad): i for i, grad in enumerate(grads_of(self._params))}
        if any(id(grad) not in numbers for grad in grads):
            raise RuntimeError("pass the .grad of parameters within join(), not other tensors")
        self._say("norm", [numbers[id(grad)] for grad in grads], norm_type, meetings=1)

    def say_clip(self, params: Sequence[Tensor], max_norm: float, total: Tensor) -> None:
        """The gradients of these parameters are about to be scaled down to a norm."""
        numbers = {id(param): i for i, param in enumerate(self._params)}
        chosen = [numbers[id(param)] for param in params if id(param) in numbers]
        if chosen:
            self._say("clip", chosen, float(max_norm), total.detach())

    def say_unscale(
        self,
        scaler: torch.amp.GradScaler,
        optimizer: torch.optim.Optimizer,
        owners: Sequence[Any],
        inv_scale: Tensor,
        allow_fp16: bool,
    ) -> None:
        """An optimizer's gradients are about to be unscaled; each of their `owners` has one
        exchange. Raises RuntimeError for a scaler that was not passed to join(): ranks without data
        would continue with another scale."""
        number = self._number_of(optimizer)
        if number is None:
            return
        if all(each is not scaler for each in self._others):
            raise RuntimeError("join() did not get the scaler: call join(optimizer, scaler)")
        meetings = int(self.engine in owners)
        self._say("unscale", number, inv_scale.detach(), allow_fp16, meetings=meetings)

    def say_rescale(self, engine: Any, factor: float) -> None:
        """A scaler has changed the scale of the losses, and so of what wire= carries over."""
        if engine == self.engine:
            self._say("rescale", 0, factor)

    # --- a rank without data does the same --------------------------------------------------------

    def follow(self) -> None:
        """Do as the ranks with data do, until none has any; then all ranks are in the same
        state."""
        self.follows = True
        while self.engine.join_follow():
            act, values = self._share(None)
            getattr(self, f"_{act}")(*values)
        self.is_over = True
        news = self.engine.join_news()
        if news is None or not news[3]:  # no rank has followed others
            return
        _, leader, latest, _ = news
        comm = state_of(self._model).comms.all
        states = [other.state_dict() for other in self._others]
        options, states = self._share(([*map(_options_of, self._optimizers)], states))
        if state_of(self._model).sync_buffers:  # as DDP does: the highest rank of them
            for buffer in self._model.buffers():
                take_from(latest, comm, buffer.detach())
        if comm.rank == leader:
            return
        for number, groups in enumerate(options):
            self._set_options(number, groups)
        for other, state in zip(self._others, states, strict=True):
            other.load_state_dict(state)

    def _align(self, held: Sequence[bool]) -> None:
        """Drop gradients that the leading rank has dropped since the last backward, and those of
        ignored parameters, which no other rank shares."""
        for i, (param, is_held) in enumerate(zip(self._params, held, strict=True)):
            if not is_held or not self._is_sharded[i]:
                param.grad = None
            elif param.grad is None:
                raise RuntimeError(
                    f"the .grad of parameter {i} is not from a backward, as join() needs it: let "
                    "backward make all gradients"
                )

    def _without_others(self, number: int) -> torch.optim.Optimizer:
        """Return the optimizer without parameters of other modules, which have no gradients here:
        no other rank shares them."""
        optimizer = self._optimizers[number]
        for group in optimizer.param_groups:
            for param in group["params"]:
                if part_of(param) is None:
                    param.grad = None
        return optimizer

    def _set_options(self, number: int, options: Sequence[dict[str, Any]]) -> None:
        groups = self._optimizers[number].param_groups
        if len(groups) != len(options):
            raise RuntimeError("param groups were added within join(): add them before")
        for group, values in zip(groups, options, strict=True):
            for key, value in values.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value

    def _step(
        self, number: int, held: list[bool], options: list[dict[str, Any]], extra: dict[str, Any]
    ) -> None:
        optimizer = self._without_others(number)
        self._align(held)
        self._set_options(number, options)
        extra = {name: value for name, value in extra.items() if value is not None}
        for name, value in extra.items():
            setattr(optimizer, name, value)
        try:
            optimizer.step()
        finally:
            for name in extra:
                delattr(optimizer, name)

    def _zero(self, number: int, held: list[bool]) -> None:
        self._align(held)
        self._optimizers[number].zero_grad(set_to_none=False)

    def _norm(self, numbers: list[int], held: list[bool], norm_type: float) -> None:
        self._align(held)
        grads = [self._params[i].grad for i in numbers]
        torch.nn.utils.get_total_norm([g for g in grads if g is not None], norm_type)

    def _clip(self, numbers: list[int], held: list[bool], max_norm: float, total: Tensor) -> None:
        self._align(held)
        params = [self._params[i] for i in numbers]
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, total)

    def _unscale(self, number: int, held: list[bool], inv_scale: Tensor, allow_fp16: bool) -> None:
        self._align(held)
        scaler = GradScaler.__new__(GradScaler)  # its method needs no options
        found_inf = torch.zeros((), dtype=torch.float32, device=inv_scale.device)
        optimizer = self._without_others(number)
        GradScaler._unscale_grads_(scaler, optimizer, inv_scale, found_inf, allow_fp16)

    def _rescale(self, number: int, held: list[bool], factor: float) -> None:
        self.engine.rescale(factor)


_live: dict[Any, _Joined] = {}


def _options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _zero_grad(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
    if not set_to_none:
        _announcer.announce("zero", optimizer)
    type(optimizer).zero_grad(optimizer, set_to_none)


class _Announcer(Extension):
    """What models within join() do on a rank with data."""

    def announce(self, act: str, *about: Any) -> None:
        for joined in [each for each in _live.values() if not each.follows]:
            getattr(joined, f"say_{act}")(*about)


class _Pickler(pickle.Pickler):
    """A tensor on a GPU arrives on the other rank's own GPU, whatever its index."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_cuda:
            return _on_this_gpu, (value.detach().cpu(),)
        return NotImplemented


def _on_this_gpu(value: Tensor) -> Tensor:
    return value.cuda()


_announcer = _Announcer()
EXTENSIONS.append(_announcer)
