"""The state of a model's parameters at a moment, and who may read or write them then.

Between steps each parameter is this rank's shard, in its own dtype, and everything is allowed. At
other moments the values are those of a pass, a copy, or others that a context takes back at its
end. A reader or writer names the moments that it is not made for, and refuse() raises one sentence
for each.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import torch
from torch import nn

from zshard.units.units import State, units_of


class Moment(enum.Enum):
    """A moment, with what an error says of it."""

    PASS = "during a step: do it before the forward, or after the optimizer's step"
    BACKWARD = "during a backward: do it before or after that"
    UNSHARDED = (
        "while unshard() or summon_full_params() keeps the parameters of unit '{unit}' unsharded: "
        "call reshard() or leave the context first"
    )
    REPLACED = "within {context}, which restores the parameters at its end: leave the context first"
    ELSEWHERE = (
        "on this rank within summon_full_params(rank0_only=True), which gathers unit '{unit}' on "
        "rank 0 alone: do it there, or omit rank0_only"
    )


PASS, BACKWARD, UNSHARDED, REPLACED, ELSEWHERE = Moment


def is_now(state: State, moment: Moment) -> bool:
    """Return whether it is that moment for a unit. Several may be."""
    unit = state.unit
    if moment in (PASS, BACKWARD):
        in_backward = torch._C._current_graph_task_id() != -1
        return in_backward or (moment is PASS and unit.in_forward)
    if moment is REPLACED:
        return state.model.replaced != ""
    by_rank_0 = any(each.rank0_only for each in state.summons) and not unit.replicated
    elsewhere = by_rank_0 and not unit.is_pinned
    return elsewhere or (moment is UNSHARDED and unit.is_pinned)


def refuse(states: Iterable[State], to: str, *moments: Moment) -> None:
    """Raise RuntimeError, "cannot {to} ...", if it is one of these moments for one of the units."""
    for state in states:
        for moment in moments:
            if is_now(state, moment):
                unit, context = state.unit.name or "(root)", state.model.replaced
                raise RuntimeError(f"cannot {to} {moment.value.format(unit=unit, context=context)}")


def is_for_now(state: State) -> bool:
    """Return whether a context takes back at its end the values that the parameters have now."""
    return is_now(state, REPLACED) or any(not each.writeback for each in state.summons)


def reshard_all(model: nn.Module, to: str) -> None:
    """Bring all parameters to their state between steps. Raise RuntimeError, "cannot {to} ...",
    during forward or backward, and while they are unsharded by hand."""
    states = [state for _, state in units_of(model)]
    refuse(states, to, UNSHARDED, PASS)
    for state in states:
        state.unit.unpin()
