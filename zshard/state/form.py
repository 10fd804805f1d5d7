"""What form state_dict() has: which ranks get it, and whether it has full tensors or shards.

Every rank gets full tensors unless something else is chosen, for a with block or
until the next choice. Units remember the choice, as state_dict() may be called on any module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from zshard.units.units import StateDictForm, units_of


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
    before = [state.form for state in states]
    for state in states:
        state.form = StateDictForm(slices, rank0_only, optim_rank0_only, settings)
    try:
        yield
    finally:
        for state, form in zip(states, before, strict=True):
            state.form = form
