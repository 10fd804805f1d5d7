"""State dicts: of modules and of optimizers, and how they are loaded.

Every rank gets full tensors unless the script chooses another form (state_dict_form), for a with
block or until the next choice. Units store the choice, as state_dict() may be called on any module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from zshard.units.units import StateDictForm, units_of

__all__ = ["state_dict_form"]


@contextlib.contextmanager
def state_dict_form(
    module: nn.Module,
    rank0_only: bool = False,
    optim_rank0_only: bool = False,
    settings: object = None,
) -> Iterator[None]:
    """Context manager that sets what state_dict() of `module` and of its units returns: the fields
    of a StateDictForm."""
    states = [state for _, state in units_of(module)]
    before = [state.form for state in states]
    for state in states:
        state.form = StateDictForm(rank0_only, optim_rank0_only, settings)
    try:
        yield
    finally:
        for state, form in zip(states, before, strict=True):
            state.form = form
