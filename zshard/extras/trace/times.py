"""The report of a trace: of each unit's time, where the time of a range within another counts for
the inner one only; of the waits, with their peers; and of who came last."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from zshard.extras.trace.records import Range, RankTrace

_KINDS = {  # of ranges: the column of the report that counts their time
    **dict.fromkeys(("forward", "backward", "pack"), ""),
    **dict.fromkeys(("all_gather", "unshard"), "gather"),
    **dict.fromkeys(("reduce_scatter", "all_reduce", "sum_gradients"), "sum"),
    **{"all_gather_gradients": "sum", "step": "step", "optimizer.step": "step"},
}
_COLUMNS = ("forward", "backward", "wait", "gather", "pack", "sum", "step", "calls")
_MEETINGS = ("forward (root)", "all_gather (", "reduce_scatter (", "all_reduce (")
_MOST_WAITS = 10  # lines of the text


def parts_of(name: str) -> tuple[str, str, str]:
    """Return the column that counts a range's time, its unit, and for whom it waits; "" if there is
    none."""
    text = _short(name)
    if text.startswith(("wait for ", "transfer (")):
        unit = re.search(r"unit '(.*?)'", text)
        whom = re.match(r"wait for (rank \d+|all ranks)", text)
        named = unit[1] if unit else ""
        return "wait", "root" if named == "(root)" else named, whom[1] if whom else "transfer"
    what, _, unit_name = text.partition(" (")
    kind = _KINDS.get(what, "calls")
    return kind or what, unit_name.removesuffix(")"), ""


def own_times(ranges: Iterable[Range]) -> Iterator[tuple[str, str, str, int]]:
    """Yield each range's column, unit, name, and the nanoseconds of it that are in no range within
    it. A wait that names no unit is that of the range around it."""
    open_: dict[int, list[list[Any]]] = {}  # by thread: [end, column, unit, name, own time]
    for name, thread, begun, ended in sorted(ranges, key=lambda each: (each[2], -each[3])):
        stack = open_.setdefault(thread, [])
        while stack and stack[-1][0] <= begun:
            _, *entry = stack.pop()
            yield tuple(entry)
        column, unit, _ = parts_of(name)
        if stack:
            stack[-1][4] -= min(ended, stack[-1][0]) - begun
            unit = unit or stack[-1][2]
        stack.append([ended, column, unit, name, ended - begun])
    for stack in open_.values():
        for _, *entry in stack:
            yield tuple(entry)


def _short(name: str) -> str:
    return name.removeprefix("zshard::")


# --- who comes last -------------------------------------------------------------------------------


class Arrival(NamedTuple):
    """When all ranks had begun a collective or forward, on the trace's clock: with which rank, and
    how many nanoseconds after the rank before it."""

    at: int
    rank: int
    after: int
    what: str


def arrivals_of(ranks: Sequence[RankTrace]) -> list[Arrival]:
    """Return the arrivals at what all ranks have run as often as each other: the n-th of a rank is
    the n-th of all. Those that are too close for the hosts' clocks are left out."""
    begins: list[dict[str, list[int]]] = []
    for each in ranks:
        times_of: dict[str, list[int]] = {}
        for name, _, begun, _ in sorted(each.ranges, key=lambda of: of[2]):
            if _short(name).startswith(_MEETINGS):
                times_of.setdefault(_short(name), []).append(begun + each.shift)
        begins.append(times_of)
    error = max((each.error for each in ranks), default=0)
    arrivals = []
    for what in set.intersection(*map(set, begins)) if len(ranks) > 1 else ():
        if len({len(times_of[what]) for times_of in begins}) > 1:
            continue  # some rank has skipped the unit
        for times in zip(*(times_of[what] for times_of in begins), strict=True):
            *_, (before, _), (at, index) = sorted((time, i) for i, time in enumerate(times))
            if at - before > 2 * error:
                arrivals.append(Arrival(at, ranks[index].rank, at - before, what))
    return sorted(arrivals)


def _late_in_waits(trace: RankTrace, arrivals: Sequence[Arrival]) -> defaultdict[str, Counter[int]]:
    """Return for each wait for all ranks who came last while it lasted, and how often."""
    late: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for name, _, begun, ended in trace.ranges:
        _, unit, whom = parts_of(name)
        if whom != "all ranks":
            continue
        first, end = (bisect_left(arrivals, (at + trace.shift,)) for at in (begun, ended))
        ranks = [each.rank for each in arrivals[first:end] if parts_of(each.what)[1] == unit]
        if ranks and ranks[-1] != trace.rank:
            late[_short(name)][ranks[-1]] += 1
    return late


def _last(rank: int, arrivals: Sequence[Arrival]) -> dict[str, Any]:
    of_rank = [each for each in arrivals if each.rank == rank]
    late, until = 0, 0  # a rank that is late to a forward is also late to its first gather
    for each in of_rank:
        late += each.at - max(each.at - each.after, min(until, each.at))
        until = each.at
    longest = max(of_rank, key=lambda each: each.after, default=Arrival(0, rank, 0, ""))
    worst = {"longest": longest.after / 1e9, "what": longest.what}
    return {"count": len(of_rank), "of": len(arrivals), "seconds": late / 1e9, **worst}


# --- one rank's report ----------------------------------------------------------------------------


def summaries_of(ranks: Sequence[RankTrace]) -> list[dict[str, Any]]:
    """Return the reports of these ranks."""
    arrivals = arrivals_of(ranks)
    return [summary_of(each, arrivals) for each in ranks]


def summary_of(trace: RankTrace, arrivals: Sequence[Arrival]) -> dict[str, Any]:
    """Return the report of one rank, for JSON. arrivals: those of all ranks."""
    late = _late_in_waits(trace, arrivals)
    units: dict[str, dict[str, float]] = {}
    waits: dict[tuple[str, str], list[int]] = {}
    for column, unit, name, nanoseconds in own_times(trace.ranges):
        times = units.setdefault(unit, dict.fromkeys(_COLUMNS, 0.0))
        times[column] += nanoseconds / 1e9
        if column == "wait":
            waits.setdefault((unit, _short(name)), []).append(nanoseconds)
    exposed = sum(times["wait"] for times in units.values())
    seconds = (trace.ended - trace.begun) / 1e9
    listed: list[dict[str, Any]] = []
    for (unit, what), each in waits.items():
        wait = {"unit": unit, "for": parts_of(what)[2], "what": what, "count": len(each)}
        times = {"seconds": sum(each) / 1e9, "longest": max(each) / 1e9}
        last = {str(rank): n for rank, n in late[what].most_common()}
        listed.append({**wait, **times, "last": last})
    return {
        "rank": trace.rank,
        "seconds": seconds,
        "steps": sum(_short(name) == "optimizer.step" for name, *_ in trace.ranges),
        "exposed_seconds": exposed,
        "exposed_share": exposed / seconds if seconds else 0.0,
        "clock_error_seconds": trace.error / 1e9,
        "lost": trace.lost,
        "last": _last(trace.rank, arrivals),
        "units": [{"unit": unit, **times} for unit, times in units.items()],
        "waits": sorted(listed, key=lambda each: -each["seconds"]),
    }


def text_of(summary: dict[str, Any]) -> str:
    """Return the text of such a report."""
    lines = [
        f"rank {summary['rank']}: {summary['seconds']:.3f} s, {summary['steps']} optimizer steps; "
        f"exposed communication {1e3 * summary['exposed_seconds']:.1f} ms "
        f"({100 * summary['exposed_share']:.1f} %)",
    ]
    last = summary["last"]
    if last["count"]:
        lines.append(
            f"came last {last['count']} times of {last['of']}, "
            f"{1e3 * last['seconds']:.1f} ms after the others in all, at most "
            f"{1e3 * last['longest']:.1f} ms: {last['what']}"
        )
    width = max([4, *(len(each["unit"]) for each in summary["units"])])
    lines.append(f"{'ms':{width}}" + "".join(f"{column:>10}" for column in _COLUMNS))
    for each in summary["units"]:
        cells = "".join(f"{1e3 * each[column]:10.2f}" for column in _COLUMNS)
        lines.append(f"{each['unit'] or '-':{width}}{cells}")
    for each in summary["waits"][:_MOST_WAITS]:
        late = "".join(f"; rank {rank} came last to {n}" for rank, n in each["last"].items())
        longest = f"the longest {1e3 * each['longest']:.2f} ms"
        lines.append(
            f"{1e3 * each['seconds']:8.2f} ms in {each['count']}, {longest}: {each['what']}{late}"
        )
    return "\n".join(lines)
