"""FSDP1's `state_dict_type`: which state_dict() a script wants, in the words it has for that.

The one idea: state_dict() of zshard is FULL_STATE_DICT without asking. What is left to say is
who gets it; torch's enum and config objects are known by their names and fields.
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

    state_dict_type: FULL_STATE_DICT of torch.distributed.fsdp.StateDictType, or that name.
    state_dict_config: a FullStateDictConfig; with its `rank0_only`, ranks other than 0 get an empty
        dict. `offload_to_cpu` asks for what is so anyway.
    optim_state_dict_config: the same for FSDP.optim_state_dict(); with its `rank0_only`, rank 0
        alone has what FSDP.optim_state_dict_to_load() takes, too.

    Raises NotImplementedError for another type, which gives no plain tensors.
    """
    name = state_dict_type.name if isinstance(state_dict_type, enum.Enum) else state_dict_type
    if name != "FULL_STATE_DICT":
        raise NotImplementedError(
            f"state_dict_type {name!r} is not in this version of zshard; FULL_STATE_DICT, whole "
            "plain tensors, is what state_dict() gives"
        )
    configs = state_dict_config, optim_state_dict_config
    wanted = [bool(getattr(config, "rank0_only", False)) for config in configs]
    before = [(s, s.rank0_only, s.optim_rank0_only) for _, s in units_of(module)]
    for state, _, _ in before:
        state.rank0_only, state.optim_rank0_only = wanted
    try:
        yield
    finally:
        for state, *was in before:
            state.rank0_only, state.optim_rank0_only = was
