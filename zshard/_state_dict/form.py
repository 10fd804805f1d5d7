"""What form state_dict() has: which ranks get it, and whether it has full tensors or shards.

The one idea: every rank gets full tensors unless something else is chosen, for a with block or
until the next choice. Units remember the choice, as state_dict() may be called on any module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from zshard._units.units import State, units_of


class StateDictForm(NamedTuple):
    """What state_dict() of units returns.

    slices: this rank's shards, and nothing is gathered. rank0_only: other ranks get an empty dict.
    optim_rank0_only: the same for state dicts of the model's optimizers. settings: what the script
    passed to choose this form, which it may ask for; None: nothing.
    """

    slices: bool = False
    rank0_only: bool = False
    optim_rank0_only: bool = False
    settings: Any = None


def form_of(state: State) -> StateDictForm:
    """Return the form that is chosen for a unit."""
    return StateDictForm(
        state.slices, state.rank0_only, state.optim_rank0_only, state.form_settings
    )


def set_form(state: State, form: StateDictForm) -> None:
    """Choose the form of a unit's state dicts."""
    state.slices, state.rank0_only, state.optim_rank0_only, state.form_settings = form


@contextlib.contextmanager
def state_dict_form(
    module: nn.Module,
    *,
    slices: bool = False,
    rank0_only: bool = False,
    optim_rank0_only: bool = False,
    settings: Any = None,
) -> Iterator[None]:
    """Context manager that sets what state_dict() of `module` and of its units returns.

    The arguments are the fields of StateDictForm.
    """
    states = [state for _, state in units_of(module)]
    before = [form_of(state) for state in states]
    for state in states:
        set_form(state, StateDictForm(slices, rank0_only, optim_rank0_only, settings))
    try:
        yield
    finally:
        for state, form in zip(states, before, strict=True):
            set_form(state, form)
