"""What form state_dict() has: which ranks get it, and whether it has full tensors or shards.

The one idea: every rank gets full tensors unless something else is chosen, for a with block. Units
remember the choice, as state_dict() may be called on any module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from zshard._units.units import units_of


@contextlib.contextmanager
def state_dict_form(
    module: nn.Module,
    *,
    slices: bool = False,
    rank0_only: bool = False,
    optim_rank0_only: bool = False,
) -> Iterator[None]:
    """Context manager that sets what state_dict() of `module` and of its units returns.

    slices: this rank's shards, and nothing is gathered. rank0_only: other ranks get an empty dict.
    optim_rank0_only: the same for state dicts of the model's optimizers.
    """
    states = [state for _, state in units_of(module)]
    before = [(s.rank0_only, s.optim_rank0_only, s.slices) for s in states]
    for state in states:
        state.rank0_only, state.optim_rank0_only = rank0_only, optim_rank0_only
        state.slices = slices
    try:
        yield
    finally:
        for state, was in zip(states, before, strict=True):
            state.rank0_only, state.optim_rank0_only, state.slices = was
