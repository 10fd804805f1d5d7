"""FSDP1's `state_dict_type`: select what state_dict() returns.

The one idea: state_dict() of zshard is FULL_STATE_DICT by default. What remains to choose is which
ranks get it, or that each rank gets its own shards and nothing is gathered; torch's enum and config
objects are recognized by their names and fields.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import Any

from torch import nn

from zshard._units.units import units_of


@contextlib.contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: Any,
    state_dict_config: Any = None,
    optim_state_dict_config: Any = None,
) -> Iterator[None]:
    """Context manager that sets what state_dict() of `module` and of its units returns.

    Args:
        module: a module with sharded modules.
        state_dict_type: a torch.distributed.fsdp.StateDictType, or its name.
            FULL_STATE_DICT: full tensors (the default outside this context).
            SHARDED_STATE_DICT or LOCAL_STATE_DICT, equivalent here: this rank's shard of each
            sharded parameter, a 1-D copy under the plain name; full buffers and unsharded
            parameters. Not collective. load_state_dict() accepts such shards within this context,
            on the rank that has the same ones (the dict's `_metadata` records which: keep it, as
            torch.save does), and full tensors as everywhere.
        state_dict_config: a FullStateDictConfig. With `rank0_only`, other ranks get an empty dict
            and unshard one unit at a time. `offload_to_cpu` is ignored.
        optim_state_dict_config: the same for FSDP.optim_state_dict(). With `rank0_only`, only rank
            0 passes a dict to FSDP.optim_state_dict_to_load().

    Raises ValueError for an unknown type.
    """
    name = state_dict_type.name if isinstance(state_dict_type, enum.Enum) else state_dict_type
    if name not in _TYPES:
        known = ", ".join(map(repr, _TYPES))
        raise ValueError(f"unknown state_dict_type {name!r}: expected one of {known}")
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
"""Whether the type contains shards."""
