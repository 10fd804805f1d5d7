"""What a rank with data tells the ranks without, within join(), of calls that are not passes.

Passes are announced by the core (csrc/engine/join.h); what Python does between them
(an optimizer's step, clipping, unscaling) is announced here, before it happens. Only where some
rank has no more data does it get to know with which values, to do the same on its shard.
"""

from __future__ import annotations

import functools
import pickle
import weakref
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from zshard import _core
from zshard.guard.slices import plain
from zshard.units.shards import units_stepped_by

__all__ = [
    "Act",
    "Joined",
    "say_clip",
    "say_norm",
    "say_step",
    "say_unscale",
]


class Act(IntEnum):
    """What is announced."""

    STEP = 1
    ZERO = 2
    NORM = 3
    CLIP = 4
    UNSCALE = 5


_WORDS = {
    Act.STEP: "in an optimizer's step()",
    Act.ZERO: "in zero_grad(set_to_none=False)",
    Act.NORM: "computing a norm of gradients",
    Act.CLIP: "clipping gradients",
    Act.UNSCALE: "unscaling gradients",
}

_STEP_ATTRIBUTES = ("grad_scale", "found_inf")
"""What torch's GradScaler sets on an optimizer for the time of a step."""

_live: dict[_core.Engine, Joined] = {}


class Joined:
    """A model within join(), on this rank."""

    def __init__(
        self,
        engine: _core.Engine,
        params: list[Tensor],
        optimizers: list[torch.optim.Optimizer],
    ) -> None:
        self.engine = engine
        self.params = params
        self.optimizers = optimizers
        self.scalers: dict[int, torch.amp.GradScaler] = {}  # those that were used, by number
        self.follows = False  # this rank has no more data

    def begin(self) -> None:
        """Announce from now on."""
        _live[self.engine] = self
        for optimizer in self.optimizers:
            optimizer.zero_grad = functools.partial(_zero_grad, optimizer)  # type: ignore[method-assign]

    def end(self) -> None:
        """Announce no more."""
        _live.pop(self.engine, None)
        for optimizer in self.optimizers:
            vars(optimizer).pop("zero_grad", None)

    def say(self, act: Act, values: Callable[[], Any], number: int = 0, meetings: int = 0) -> None:
        """Announce an act; ranks without data get `values()` of the lowest rank with data."""
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"a hook was {_WORDS[act]} within a backward, which join() does not support: do it "
                "after backward"
            )
        code = int(act) + len(Act) * number
        if self.engine.join_call(code, f"{_WORDS[act]}{f' #{number}' if number else ''}", meetings):
            self.share((act, values()))

    def share(self, mine: Any) -> Any:
        """Return the leading rank's object. Collective."""
        return pickle.loads(self.engine.join_share(pickle.dumps(mine)))

    def number_of(self, optimizer: torch.optim.Optimizer) -> int:
        """Return which of the optimizers this is. Raises RuntimeError if it is none of them."""
        for number, each in enumerate(self.optimizers):
            if each is optimizer:
                return number
        name = type(optimizer).__name__
        raise RuntimeError(
            f"{name} steps a model within join(), but join() does not know it: pass all optimizers "
            f"of the model, as in model.join(optimizer)"
        )

    def held(self) -> list[bool]:
        """Return which parameters have a gradient."""
        return [param.grad is not None for param in self.params]

    def indices(self, params: Iterable[Tensor]) -> list[int]:
        """Return the numbers of those that are parameters of this model."""
        numbers = {id(param): i for i, param in enumerate(self.params)}
        return [numbers[id(param)] for param in params if id(param) in numbers]


def _speaking(engine: _core.Engine) -> Joined | None:
    joined = _live.get(engine)
    return None if joined is None or joined.follows else joined


def _speaking_of(optimizer: torch.optim.Optimizer) -> list[Joined]:
    if not _live:
        return []
    found = [_speaking(unit.engine) for unit in units_stepped_by(optimizer)]
    return [joined for joined in found if joined is not None]


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the param groups without their parameters."""
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def say_step(optimizer: torch.optim.Optimizer) -> None:
    """A step is about to change parameters."""
    for joined in _speaking_of(optimizer):
        number = joined.number_of(optimizer)

        def values(joined: Joined = joined, number: int = number) -> Any:
            extra = {name: getattr(optimizer, name, None) for name in _STEP_ATTRIBUTES}
            return number, joined.held(), options_of(optimizer), extra

        joined.say(Act.STEP, values, number)


def _zero_grad(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
    """An optimizer's zero_grad() within join(): gradients are about to be set to zero in place."""
    for joined in [] if set_to_none else _speaking_of(optimizer):
        number = joined.number_of(optimizer)
        joined.say(Act.ZERO, lambda number=number, joined=joined: (number, joined.held()), number)  # type: ignore[misc]
    type(optimizer).zero_grad(optimizer, set_to_none)


def say_norm(engine: _core.Engine, grads: list[Tensor], norm_type: float) -> None:
    """All ranks' parts of a norm of these gradients of a model are about to be exchanged."""
    joined = _speaking(engine) if _live else None
    if joined is None:
        return

    numbers = {id(param.grad): i for i, param in enumerate(joined.params)}
    if any(id(grad) not in numbers for grad in grads):
        raise RuntimeError(
            "a norm of tensors that are not the .grad of parameters is not possible in join(), as "
            "ranks without data could not follow: pass the parameters' .grad as they are"
        )
    chosen = [numbers[id(grad)] for grad in grads]
    joined.say(Act.NORM, lambda: (chosen, joined.held(), norm_type), meetings=1)


def say_clip(params: list[Tensor], max_norm: float, total: Tensor) -> None:
    """The gradients of these parameters are about to be scaled down to a norm."""
    for joined in [each for each in _live.values() if not each.follows]:
        numbers = joined.indices(params)
        if not numbers:
            continue

        def values(joined: Joined = joined, numbers: list[int] = numbers) -> Any:
            return numbers, joined.held(), float(max_norm), total.detach().clone()

        joined.say(Act.CLIP, values)


def say_unscale(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    owners: list[_core.Engine],
    inv_scale: Tensor,
    allow_fp16: bool,
) -> None:
    """The gradients of an optimizer are about to be unscaled; their `owners` meet once each."""
    for joined in _speaking_of(optimizer):
        number = joined.number_of(optimizer)
        name = number_of_scaler(scaler)
        if name is not None:
            joined.scalers[name] = scaler

        def values(joined: Joined = joined, number: int = number) -> Any:
            with plain():
                return number, joined.held(), inv_scale.detach().clone(), allow_fp16

        joined.say(Act.UNSCALE, values, number, meetings=int(joined.engine in owners))


# --- grad scalers ---------------------------------------------------------------------------------

_scalers: list[weakref.ref[torch.amp.GradScaler]] = []
"""All that were made or, if older than the first model, used: in one order on all ranks, by which a
rank finds its own one."""


def know_scaler(scaler: torch.amp.GradScaler) -> None:
    """Register a scaler that has been made, or is used. Idempotent."""
    if number_of_scaler(scaler) is None:
        _scalers.append(weakref.ref(scaler))


def number_of_scaler(scaler: torch.amp.GradScaler) -> int | None:
    """Return its number; None for one that zshard does not know."""
    return next((i for i, each in enumerate(_scalers) if each() is scaler), None)


def scaler_of(number: int) -> torch.amp.GradScaler | None:
    """Return the scaler of a number, if it lives."""
    return _scalers[number]() if number < len(_scalers) else None
