"""The tables that model.summary() prints.

What a reader wants to compare is in one column.
"""

from __future__ import annotations

from zshard import _core
from zshard.ranks.transports import Comms
from zshard.ranks.wire import Wire, wire_words
from zshard.units.units import State, is_apart

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(count: float) -> str:
    """Return a size for people: 1536 -> '1.5 KiB'."""
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def summary_of(states: list[State], comms: Comms, wire: Wire) -> str:
    """Return the table of units: one line per unit, then totals. wire: of the model."""
    units = [state.unit for state in states]
    comm, shards, shard_group, replica_group = comms
    rows = [("unit", "parameters", "unsharded", "per rank", "strategy")]
    numel = whole = local = 0
    for state, unit in zip(states, units, strict=True):
        count = sum(_product(unit.param(i)["shape"]) for i in range(unit.n_params))
        sizes = unit.bytes
        numel, whole, local = numel + count, whole + sizes["full"], local + sizes["shard"]
        name = unit.name or "(root)"
        cells = (f"{count:,}", format_bytes(sizes["full"]), format_bytes(sizes["shard"]))
        ranks = f" over {state.comms.all.world} rank(s)" if is_apart(state, comms) else ""
        stays = ", stays gathered" if unit.is_kept else ""
        by = unit.read_by
        read = "" if by is None else f", read by {by or '(root)'}"
        rows.append((name, *cells, unit.strategy + ranks + stays + read))
    rows.append((f"{len(units)} units", f"{numel:,}", format_bytes(whole), format_bytes(local), ""))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [_line(row, widths) for row in rows]
    rule = "-" * len(lines[0])
    head = f"zshard: rank {comm.rank} of {comm.world}, transport {comm.transport}"
    if shards.world < comm.world:
        count = comm.world // shards.world
        head += f"; {count} replicas of {shards.world} rank(s) each, transport {shards.transport}"
    if replica_group is not None:
        head += f"; secondary shards over {shard_group.world} rank(s), "
        head += f"transport {shard_group.transport}"
    head += _kept(units[0].engine)
    words = wire_words(comm, wire, units)
    head += f"; {words}" if words else ""
    return "\n".join([head, lines[0], rule, *lines[1:-1], rule, lines[-1]])


def _kept(engine: _core.Engine) -> str:
    """What stays gathered from forward to backward, for the head of the table."""
    kept, _, is_open, costs = engine.kept()
    if costs and is_open:
        return '; keep_gathered="auto" decides after the first steps'
    return f"; {format_bytes(kept)} stay gathered from forward to backward" if kept else ""


def memory_table(kinds: dict[str, dict[str, int]]) -> str:
    """Return the table of memory in MiB, one line per part. `kinds`: the columns, bytes by part.
    Parts that are 0 in all columns are omitted."""
    parts = list(next(iter(kinds.values())))
    rows = [("memory, MiB", *kinds)]
    for part in parts:
        numbers = [bytes_by_part[part] for bytes_by_part in kinds.values()]
        if any(numbers) or part == "total":
            rows.append((part, *(f"{number / (1 << 20):.1f}" for number in numbers)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    rule = "-" * len(lines[0])
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [row[0].ljust(widths[0])]
    cells += [row[i].rjust(widths[i]) for i in (1, 2, 3)]
    return "  ".join([*cells, row[4].ljust(widths[4])]).rstrip()


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
