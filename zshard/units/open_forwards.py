"""End a forward that an exception has left.

Torch runs a module's forward hooks after an Exception, but not after a KeyboardInterrupt or
SystemExit. So a caller of a unit's forward notes how many forwards are open before, and on any
exception ends those that were opened since: a script that catches it can continue, and other ranks
do not wait.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from zshard import _core
from zshard.ranks.groups import check_still_alone
from zshard.units.moment import ELSEWHERE, refuse
from zshard.units.units import State, class_of, state_of

__all__ = ["call_between_hooks", "call_guarded", "is_forward_open", "uncompiled"]

_LONGEST = 200  # characters of an exception that the other ranks get
_NOTE = "zshard: raised in the forward of unit"
_SHAPES = re.compile(r"\b(shapes?|sizes?|dimensions?)\b")  # in torch's messages
_MOST_PARAMS = 8  # in a note


_F = TypeVar("_F", bound=Callable[..., Any])


def uncompiled(function: _F) -> _F:
    """Decorator of a function that units share: torch.compile runs it as it is, and compiles what
    it calls. Else it would be compiled for each class of units, up to torch's limit for a function,
    beyond which the units' forwards are not compiled either."""
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):  # older torch lacks it
        action = frames._FrameAction
        as_it_is = frames._FrameExecStrategy(action.SKIP, action.DEFAULT)
        frames.set_code_exec_strategy(function.__code__, as_it_is)
    return function


@uncompiled
def call_between_hooks(
    self: nn.Module,
    unit: _core.Unit,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call `function` as torch calls the forward of a unit's module, which is `self`."""
    unit.pre_forward(self, args)
    output = function(*args, **kwargs)
    unit.post_forward(self, args, output)
    return output


@uncompiled
def call_guarded(
    module: nn.Module,
    unit: _core.Unit,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return call(*args, **kwargs), a forward of the unit's module; if that raises, end the model's
    open forwards."""
    state = state_of(module)
    if state.is_alone:
        check_still_alone(class_of(module).__name__)
    if state.summons and not _core.shares_state(state.comms.shards):
        refuse([state], "run a forward", ELSEWHERE)  # it would wait for rank 0
        if state.options.strategy.has_secondary and any(each.rank0_only for each in state.summons):
            raise RuntimeError(
                f"cannot run a forward of strategy='{state.options.strategy.value}', which needs "
                "all ranks, within summon_full_params(rank0_only=True): omit rank0_only"
            )
    n_open = unit.n_open
    if n_open and unit.is_running and state.n_calls == 0:
        unit.unwind(0, "")  # left by another kind of call, such as model.module(x)
        n_open = 0
    state.n_calls += 1
    try:
        return (
            call(*args, **kwargs) if unit.is_hooked else _call_unhooked(state, call, args, kwargs)
        )
    except BaseException as error:
        unit.unwind(n_open, _what(error) if n_open == 0 else "")
        _note_unit(error, unit)
        raise
    finally:
        state.n_calls -= 1


@uncompiled
def _call_unhooked(
    state: State, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    state.model.n_unhooked += 1
    try:
        return call(*args, **kwargs)
    finally:
        state.model.n_unhooked -= 1


def is_forward_open(state: State) -> bool:
    """Return whether a forward of the unit's model is running."""
    return state.unit.in_forward if state.unit.is_hooked else state.model.n_unhooked > 0


def _note_unit(error: BaseException, unit: _core.Unit) -> None:
    """Add to torch's error about shapes the innermost unit that it was raised in, and the shapes of
    its parameters."""
    if type(error) is not RuntimeError or _SHAPES.search(str(error)) is None:
        return
    if any(_NOTE in note for note in getattr(error, "__notes__", ())):
        return
    facts = [unit.param(index) for index in range(min(unit.n_params, _MOST_PARAMS))]
    shapes = ", ".join(f"{fact['name']} {tuple(fact['shape'])}" for fact in facts)
    more = ", ..." if unit.n_params > _MOST_PARAMS else ""
    error.add_note(f"{_NOTE} '{unit.name or '(root)'}', with parameters {shapes}{more}")


def _what(error: BaseException) -> str:
    """Return the text about this error for the other ranks' errors; "" if it comes from another
    rank."""
    if isinstance(error, (_core.PeerError, _core.PeerTimeoutError, _core.DivergenceError)):
        return ""
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"raised {type(error).__name__}{': ' if text else ''}{text} in forward"[:_LONGEST]
