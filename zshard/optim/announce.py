"""Within join(), send calls other than passes from the ranks with data to those without.

The core announces passes (csrc/engine/join.h); this file announces what Python does between them
(an optimizer's step, clipping, unscaling) before it happens. Only a rank without data receives the
values, to do the same on its shard.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from zshard import _core
from zshard.guard.slices import grads_of
from zshard.units.extensions import EXTENSIONS
from zshard.units.shards import units_stepped_by

__all__ = [
    *("Act", "Joined", "is_joined", "options_of"),
    *("say_clip", "say_norm", "say_step", "say_unscale"),
]


class Act(IntEnum):
    """The kind of call."""

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
        optimizers: Sequence[torch.optim.Optimizer],
        others: Sequence[Any],
    ) -> None:
        """others: other objects passed to join(): schedulers, grad scalers."""
        self.engine = engine
        self.params = params
        self.optimizers = optimizers
        self.others = others
        self.follows = False  # this rank has no more data

    def begin(self) -> None:
        """Start announcing."""
        _live[self.engine] = self
        for optimizer in self.optimizers:
            optimizer.zero_grad = functools.partial(_zero_grad, optimizer)  # type: ignore[method-assign]

    def end(self) -> None:
        """Stop announcing."""
        _live.pop(self.engine, None)
        for optimizer in self.optimizers:
            vars(optimizer).pop("zero_grad", None)

    def say(self, act: Act, what: int | list[int], *values: object, meetings: int = 0) -> None:
        """Announce a call; ranks without data get the values of the lowest rank with data.

        what: the index of the optimizer that makes the call, or the parameters that it changes.
        """
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"a hook was {_WORDS[act]} within a backward, which join() does not support: do it "
                "after backward"
            )
        number = what if isinstance(what, int) else 0
        code = int(act) + len(Act) * number
        if self.engine.join_call(code, f"{_WORDS[act]}{f' #{number}' if number else ''}", meetings):
            held = [grad is not None for grad in grads_of(self.params)]
            self.share((act, (what, held, *values)))

    def share(self, mine: object) -> Any:
        """Return the leading rank's object. Collective."""
        return pickle.loads(self.engine.join_share(_packed(mine)))

    def number_of(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the index of this optimizer. Raises RuntimeError for one that was not passed."""
        for number, each in enumerate(self.optimizers):
            if each is optimizer:
                return number
        name = type(optimizer).__name__
        raise RuntimeError(
            f"{name} steps a model within join(), but join() does not know it: pass all optimizers "
            "of the model, as in model.join(optimizer)"
        )


class _Pickler(pickle.Pickler):
    """A tensor on a GPU arrives on the other rank's own GPU, whatever its index."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_cuda:
            return _on_this_gpu, (value.detach().cpu(),)
        return NotImplemented


def _on_this_gpu(value: Tensor) -> Tensor:
    return value.cuda()


def _packed(value: object) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def is_joined(engine: _core.Engine) -> bool:
    """Return whether the model is in join(), where ranks follow what others announce."""
    return engine in _live


def _speaking(engines: Iterable[_core.Engine]) -> Iterator[Joined]:
    """Return the models within join() for which this rank has data."""
    found = (_live.get(engine) for engine in engines) if _live else ()
    return (joined for joined in found if joined is not None and not joined.follows)


def _speaking_of(optimizer: torch.optim.Optimizer) -> Iterator[Joined]:
    return _speaking(unit.engine for unit in units_stepped_by(optimizer)) if _live else iter(())


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the param groups without their parameters."""
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def say_step(optimizer: torch.optim.Optimizer, is_first: bool) -> None:
    """Announce a step that is about to change parameters."""
    for joined in _speaking_of(optimizer):
        extra = {name: getattr(optimizer, name, None) for name in _STEP_ATTRIBUTES}
        number, options = joined.number_of(optimizer), options_of(optimizer)
        units = units_stepped_by(optimizer)
        meets = getattr(optimizer, "steps_together", False) or any(
            each.meets_before_step(units) for each in EXTENSIONS
        )
        meetings = -1 if meets or is_first else 0  # any number
        joined.say(Act.STEP, number, options, extra, meetings=meetings)


def _zero_grad(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
    """Announce an optimizer's zero_grad() within join(), before gradients are set to zero in
    place."""
    for joined in [] if set_to_none else _speaking_of(optimizer):
        joined.say(Act.ZERO, joined.number_of(optimizer))
    type(optimizer).zero_grad(optimizer, set_to_none)


def say_norm(engine: _core.Engine, grads: list[Tensor], norm_type: float) -> None:
    """Announce that all ranks are about to exchange their shares of a norm of these gradients."""
    for joined in _speaking([engine]):
        numbers = {id(grad): i for i, grad in enumerate(grads_of(joined.params))}
        if any(id(grad) not in numbers for grad in grads):
            raise RuntimeError(
                "a norm of tensors that are not the .grad of parameters is not possible in join(), "
                "as ranks without data could not follow: pass the parameters' .grad as they are"
            )
        joined.say(Act.NORM, [numbers[id(grad)] for grad in grads], norm_type, meetings=1)


def say_clip(params: list[Tensor], max_norm: float, total: Tensor) -> None:
    """Announce that the gradients of these parameters are about to be scaled down to a norm."""
    for joined in _speaking(list(_live)):
        numbers = {id(param): i for i, param in enumerate(joined.params)}
        chosen = [numbers[id(param)] for param in params if id(param) in numbers]
        if chosen:
            joined.say(Act.CLIP, chosen, float(max_norm), total.detach())


def say_unscale(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    owners: list[_core.Engine],
    inv_scale: Tensor,
    allow_fp16: bool,
) -> None:
    """Announce that an optimizer's gradients are about to be unscaled; each of their `owners` has
    one exchange.

    Raises RuntimeError for a scaler that was not passed to join(): ranks without data would
    continue with another scale.
    """
    for joined in _speaking_of(optimizer):
        if all(each is not scaler for each in joined.others):
            raise RuntimeError(
                "a grad scaler is used within join(), but join() does not know it: pass it behind "
                "the optimizers, as in model.join(optimizer, scaler)"
            )
        number, meetings = joined.number_of(optimizer), int(joined.engine in owners)
        joined.say(Act.UNSCALE, number, inv_scale.detach(), allow_fp16, meetings=meetings)
