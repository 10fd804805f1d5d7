"""FSDP1's `state_dict_type`: which state_dict() a script wants, in the words it has for that.

The one idea: state_dict() of zshard is FULL_STATE_DICT without asking. What is left to say is
who gets it, or that each rank is to get its own slices and nothing is to be gathered; torch's enum
and config objects are known by their names and fields.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import Any

from torch import nn

from zshard._units import units_of


@contextlib.contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: Any,
    state_dict_config: Any = None,
    optim_state_dict_config: Any = None,
) -> Iterator[None]:
    """Context in which state_dict() of `module`, and of units below it, is of that type.

    state_dict_type: FULL_STATE_DICT of torch.distributed.fsdp.StateDictType, or that name: whole
        tensors. SHARDED_STATE_DICT and LOCAL_STATE_DICT, which are the same here: of each sharded
        parameter this rank's slice, a tensor of one dimension and a copy, under the plain name;
        buffers, and parameters that are not sharded, whole. No rank waits for another.
        load_state_dict() takes such slices in that context, on the rank that has the same ones
        (they say which they are in the dict's `_metadata`: keep it, as torch.save does), and whole
        tensors as anywhere else.
    state_dict_config: a FullStateDictConfig; with its `rank0_only`, ranks other than 0 get an empty
        dict, and hold one unit whole at a time meanwhile. `offload_to_cpu` asks for what is so
        anyway.
    optim_state_dict_config: the same for FSDP.optim_state_dict(); with its `rank0_only`, rank 0
        alone has what FSDP.optim_state_dict_to_load() takes, too.

    Raises ValueError for another type.
    """
    name = state_dict_type.name if isinstance(state_dict_type, enum.Enum) else state_dict_type
    if name not in _TYPES:
        known = ", ".join(map(repr, _TYPES))
        raise ValueError(f"unknown state_dict_type {name!r}; there are {known}")
    configs = state_dict_config, optim_state_dict_config
    wanted = [bool(getattr(config, "rank0_only", False)) for config in configs]
    states = [state for _, state in units_of(module)]
    before = [(s.rank0_only, s.optim_rank0_only, s.slices) for s in states]
    for state in states:
        state.rank0_only, state.optim_rank0_only = wanted
        state.slices = _TYPES[name]
    try:
        yield
    finally:
        for state, was in zip(states, before, strict=True):
            state.rank0_only, state.optim_rank0_only, state.slices = was


_TYPES = {"FULL_STATE_DICT": False, "SHARDED_STATE_DICT": True, "LOCAL_STATE_DICT": True}
"""Whether they are slices."""
