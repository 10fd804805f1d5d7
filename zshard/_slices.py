"""State dicts of slices: what a slice is of, which goes with it, and whether it fits here.

The one idea: a slice of one place and a slice of another may look alike, so each state dict of
slices says in its `_metadata`, where nn.Module has its versions and which torch.save keeps, which
elements of which whole each of them holds. Loading compares that with what this rank holds.
"""

from __future__ import annotations

from typing import Any

from zshard._units import State

KEY = "zshard_slices"
"""In the metadata of a module: {attribute: Record}."""

Record = dict[str, Any]


def record_of(state: State, index: int) -> Record:
    """Of a unit's parameter: its whole shape, which of the parts it is cut into this rank has, and
    the first and the number of that part's row-major elements."""
    fact, shards = state.unit.param(index), state.comms.shards
    return {
        "shape": tuple(fact["shape"]),
        "begin": int(fact["begin"]),
        "numel": int(fact["numel"]),
        "part": shards.rank,
        "parts": shards.world,
    }


def misfit(record: Record, own: Record | None, wanted: bool) -> str:
    """Why the slice of `record` cannot be loaded where this rank has `own`; "" if it can.

    own: None where this rank has the parameter whole. wanted: are slices to be loaded now?
    """
    if own is None:
        return f"{_text(record)}; here it is not sharded: {_OTHERWISE}"
    if not wanted:
        return (
            f"{_text(record)}: load it within FSDP.state_dict_type(model, 'SHARDED_STATE_DICT'), "
            f"on that rank of as many; elsewhere, {_OTHERWISE}"
        )
    if record == own:
        return ""
    return f"{_text(record)}; this rank has {_text(own)}: {_OTHERWISE}"


_OTHERWISE = "save and load whole tensors (FULL_STATE_DICT, which is what state_dict() gives)"


def _text(record: Record) -> str:
    try:
        end = record["begin"] + record["numel"]
        return (
            f"elements {record['begin']} to {end} of shape {tuple(record['shape'])}, "
            f"part {record['part']} of {record['parts']}"
        )
    except (KeyError, TypeError):
        return f"a slice with a record that cannot be read ({record!r})"
