"""State dicts of shards: a record of the content of each shard, and whether it fits this rank.

Shards of different ranks may have the same shape. So each state dict of shards records in its
`_metadata`, which also has nn.Module's versions and survives torch.save, the full parameter and
elements that each shard contains. Loading compares that with this rank's shard.

The shards of a parameter are plain tensors under one name on all ranks.
torch.distributed.checkpoint takes these for copies of each other, and would save one rank's. So
dcp.save() learns which tensors are shards, where it decides what to write, and refuses them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from zshard._errors import ShardError, warn
from zshard.units.units import State

__all__ = ["KEY", "ShardRecord", "misfit", "note_shards", "record_of"]

KEY = "zshard_slices"
"""In the metadata of a module: {attribute: ShardRecord}."""

ShardRecord = dict[str, Any]


def record_of(state: State, index: int) -> ShardRecord:
    """Return the record of this rank's shard of a parameter: the full shape, the index of the shard
    and the number of shards, and the shard's row-major elements (first, count)."""
    fact, shards = state.unit.param(index), state.comms.shards
    return {
        "shape": tuple(fact["shape"]),
        "begin": int(fact["begin"]),
        "numel": int(fact["numel"]),
        "part": shards.rank,
        "parts": shards.world,
    }


def misfit(record: ShardRecord, own: ShardRecord | None, wanted: bool) -> str:
    """Return why the shard of `record` cannot be loaded into this rank's `own`; "" if it can.

    own: None if the parameter is not sharded on this rank. wanted: whether the load expects shards.
    """
    if own is None:
        return f"got {_text(record)}, but the parameter is not sharded here: {_OTHERWISE}"
    if not wanted:
        return (
            f"got {_text(record)}: load it within FSDP.state_dict_type(model, "
            f"'SHARDED_STATE_DICT') on the same rank at the same world size, or {_OTHERWISE}"
        )
    if record == own:
        return ""
    return f"got {_text(record)}, but this rank has {_text(own)}: {_OTHERWISE}"


_OTHERWISE = "save and load full tensors (FULL_STATE_DICT, the default of state_dict())"


def _text(record: ShardRecord) -> str:
    try:
        end = record["begin"] + record["numel"]
        return (
            f"shard {record['part']} of {record['parts']} (elements {record['begin']} to {end} of "
            f"shape {tuple(record['shape'])})"
        )
    except (KeyError, TypeError):
        return f"a shard with an invalid record ({record!r})"


# --- dcp.save() -----------------------------------------------------------------------------------

_shards: MutableMapping[Tensor, None] = WeakIdKeyDictionary()
"""Tensors of state dicts that are shards."""


def note_shards(tensors: Iterable[Any]) -> None:
    """Make dcp.save() refuse these tensors of a state dict."""
    _install()
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            _shards[tensor] = None


def _install() -> None:
    from torch.distributed.checkpoint import default_planner, planner_helpers  # slow to import

    if not hasattr(default_planner, "_create_write_items"):
        warn(
            "this torch decides elsewhere what dcp.save() writes, so it does not refuse shards, of "
            "which it would keep one rank's: call zshard.save()",
        )
        return
    for module in (default_planner, planner_helpers):
        make = getattr(module, "_create_write_items", None)
        if make is not None and not hasattr(make, "__wrapped__"):
            module._create_write_items = _refusing(make)  # type: ignore[attr-defined]


def _refusing(make: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    @functools.wraps(make)
    def made(fqn: str, value: object) -> Any:
        if isinstance(value, Tensor) and value in _shards:
            raise ShardError(
                f"dcp.save() was given this rank's shard of '{fqn}', and would drop those of the "
                "other ranks: call it with a state dict from outside "
                "FSDP.state_dict_type(model, 'SHARDED_STATE_DICT'), which has full tensors, or "
                "call zshard.save()"
            )
        return make(fqn, value)

    return made
