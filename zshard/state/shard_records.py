"""State dicts of shards: a record of what each shard contains, and whether it fits this rank.

Shards of different ranks may have the same shape, so each state dict of shards
records in its `_metadata`, which also has nn.Module's versions and which torch.save keeps, which
elements of which full parameter each shard contains. Loading compares that with this rank's shard.
"""

from __future__ import annotations

from typing import Any

from zshard.units.units import State

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

    own: None if the parameter is not sharded on this rank. wanted: whether shards are to be loaded.
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
