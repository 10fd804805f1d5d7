"""Traces: `with zshard.profile()`, ZSHARD_TRACE=file, and `python -m zshard trace`.

The C core records ranges of what a rank does while a trace runs (csrc/base/profile.h). Here they
become a file that Perfetto and chrome://tracing open, and a report: of each unit's time, where the
time of a range within another counts for the inner one only, and of the waits, with their peers.

Ranks of one host share a clock. The clocks of other hosts are compared in barriers: a rank leaves
none before another has entered it, which bounds their difference on both sides.
"""

from __future__ import annotations

import argparse
import atexit
import gzip
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from zshard import _core
from zshard._errors import warn
from zshard.ranks.meeting import host_id

if TYPE_CHECKING:
    from typing_extensions import Self

_KINDS = {  # of ranges: the column of the report that counts their time
    **dict.fromkeys(("forward", "backward", "pack"), ""),
    **dict.fromkeys(("all_gather", "unshard"), "gather"),
    **dict.fromkeys(("reduce_scatter", "all_reduce", "sum_gradients"), "sum"),
    **{"all_gather_gradients": "sum", "step": "step", "optimizer.step": "step"},
}
_COLUMNS = ("forward", "backward", "wait", "gather", "pack", "sum", "step", "calls")
_MOST_WAITS = 10  # lines of the text
_ROUNDS = 20  # barriers in which hosts compare their clocks

_Range = tuple[str, int, int, int]  # name, thread, begin, end: nanoseconds of CLOCK_MONOTONIC


class RankTrace(NamedTuple):
    """What one rank has recorded. wall: nanoseconds from its clock to the time of day. shift: from
    its clock to that of the trace; error: the largest error of that."""

    rank: int
    host: str
    process: int
    begun: int
    ended: int
    wall: int
    lost: int
    ranges: list[_Range]
    shift: int = 0
    error: int = 0


class Trace:
    """What ranks have recorded: `report()`, `to_json()`, `export(file)`."""

    def __init__(self, ranks: Iterable[RankTrace] = ()) -> None:
        self.ranks = sorted(ranks)

    def to_json(self) -> str:
        """Return the report as JSON: for each rank its seconds, steps, units and waits."""
        return json.dumps([_summary_of(each) for each in self.ranks], indent=1)

    def report(self) -> str:
        """Return a text: the time of each unit, and the longest waits, for each rank."""
        return "\n\n".join(_text_of(_summary_of(each)) for each in self.ranks)

    def export(self, file: str | os.PathLike[str]) -> None:
        """Write a Chrome trace, which ui.perfetto.dev opens; compressed if the name ends in .gz.

        Raises OSError if the file cannot be written.
        """
        data = json.dumps(
            {
                "displayTimeUnit": "ms",
                "traceEvents": [event for each in self.ranks for event in _events_of(each)],
                "zshard": [each._replace(ranges=[])._asdict() for each in self.ranks],
            }
        )
        path = Path(file)
        zipped = path.suffix == ".gz"
        path.write_bytes(gzip.compress(data.encode(), 1) if zipped else data.encode())


class profile(Trace):
    """Context manager that records what zshard does on this rank, and merges it over the ranks.

    Use it on all ranks; at its end they wait for each other, and rank 0 receives what all have
    recorded. Then `report()` is a text of each unit's time and of the longest waits, `to_json()`
    the same as JSON, and `export(file)` writes a trace for ui.perfetto.dev: on rank 0 of all ranks,
    on others of their own. If a rank leaves by an exception, each has only its own.

    Example::

        with zshard.profile("trace.json.gz") as trace:
            train(steps=3)
        print(trace.report())

    Args:
        file: where rank 0 writes the trace at the end; compressed if the name ends in .gz. Ranks
            that are not merged write FILE.rank1.json. Default: None, nowhere.
        merge: False: this rank alone, which waits for no other. Default: True.

    Raises RuntimeError if a trace runs already; OSError if the file cannot be written.
    """

    def __init__(self, file: str | os.PathLike[str] | None = None, *, merge: bool = True) -> None:
        super().__init__()
        self._file, self._merge = file, merge

    def __enter__(self) -> Self:
        self._begun = _start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        own = _stop(self._begun)
        merged = _merged(own, kind) if self._merge else None
        self.ranks = merged or [own]
        if self._file is not None and (merged is None or own.rank == 0):
            self.export(self._file if merged else _own_name(self._file, own.rank))


# --- one rank -------------------------------------------------------------------------------------


def _start() -> int:
    if not _core.trace_start():
        raise RuntimeError(
            "zshard.profile(): a trace runs already, of ZSHARD_TRACE or another zshard.profile(): "
            "leave that context first, or unset ZSHARD_TRACE"
        )
    return time.monotonic_ns()


def _stop(begun: int) -> RankTrace:
    ranges, lost = _core.trace_stop()
    now = time.monotonic_ns()
    if lost:
        warn(f"zshard.profile(): the trace is full and lacks {lost} ranges: trace fewer steps")
    ranges.reverse()
    process = os.getpid()
    rank = dist.get_rank() if _has_group() else int(os.environ.get("RANK", 0))
    return RankTrace(rank, host_id(), process, begun, now, time.time_ns() - now, lost, ranges)


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _own_name(file: str | os.PathLike[str], rank: int) -> Path:
    path = Path(file)
    stem, dot, ending = path.name.partition(".")
    return path.with_name(f"{stem}.rank{rank}{dot}{ending}")


_is_asked = False


def start_if_asked() -> None:
    """Start a trace for the rest of the process if ZSHARD_TRACE names a file. Idempotent."""
    global _is_asked
    file = os.environ.get("ZSHARD_TRACE")
    if _is_asked or not file:
        return
    _is_asked = True
    begun = _start()

    def write() -> None:
        own = _stop(begun)
        Trace([own]).export(_own_name(file, own.rank))

    atexit.register(write)


# --- all ranks ------------------------------------------------------------------------------------

_n_merged = 0


def _merged(own: RankTrace, kind: type[BaseException] | None) -> list[RankTrace] | None:
    """Return what all ranks have recorded on rank 0, [] on others; None if one has left by an
    exception. That one must not wait for ranks that may be waiting for it, so the store is asked
    first."""
    global _n_merged
    _n_merged += 1
    if not _has_group() or dist.get_world_size() == 1:
        return [own]
    world = dist.get_world_size()
    store, prefix = distributed_c10d._get_default_store(), f"zshard/profile/{_n_merged}/"
    store.set(prefix + str(own.rank), f"left {kind.__name__}" if kind else f"here {own.host}")
    if kind is not None:
        return None
    said = [store.get(prefix + str(r)).decode().partition(" ") for r in range(world)]
    for rank, (word, _, why) in enumerate(said):
        if word == "left":
            warn(f"zshard.profile(): rank {rank} left by {why}: this trace is of rank {own.rank}")
            return None
    rounds = _meetings() if len({host for _, _, host in said}) > 1 else []
    room: list[Any] | None = [None] * len(said) if own.rank == 0 else None
    dist.gather_object((tuple(own), rounds), room)
    if room is None:
        return []
    found = [(RankTrace(*each), met) for each, met in room]
    known = {own.host: (0, 0)}  # all ranks of a host have its clock
    for each, met in found:
        if each.host not in known:
            known[each.host] = bounds(rounds, met)
    return [
        each._replace(shift=known[each.host][0], error=known[each.host][1]) for each, _ in found
    ]


_Meeting = tuple[int, int]  # when this rank entered a barrier, and left it


def _meetings() -> list[_Meeting]:
    met = []
    for _ in range(_ROUNDS):
        entered = time.monotonic_ns()
        dist.barrier()
        met.append((entered, time.monotonic_ns()))
    return met


def bounds(first: Sequence[_Meeting], other: Sequence[_Meeting]) -> tuple[int, int]:
    """Return how far the clock of the first rank is ahead of the other's, and the error of that at
    most, in nanoseconds. Both have been in the same barriers."""
    pairs = list(zip(first, other, strict=True))
    most = min(left - entered for (_, left), (entered, _) in pairs)
    least = max(entered - left for (entered, _), (_, left) in pairs)
    return (most + least) // 2, (most - least + 1) // 2


# --- the file -------------------------------------------------------------------------------------


def _events_of(trace: RankTrace) -> Iterator[dict[str, Any]]:
    names = {trace.process: "main"}
    yield _named("process_name", trace.rank, 0, f"rank {trace.rank} on {trace.host}")
    for thread in sorted({thread for _, thread, _, _ in trace.ranges}):
        yield _named("thread_name", trace.rank, thread, names.get(thread, f"thread {thread}"))
    for name, thread, begun, ended in trace.ranges:
        yield {
            **{"ph": "X", "cat": "zshard", "name": name.removeprefix("zshard::")},
            **{"pid": trace.rank, "tid": thread},
            **{"ts": (begun + trace.shift) / 1e3, "dur": (ended - begun) / 1e3},
        }


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def read(files: Iterable[str | os.PathLike[str]]) -> Trace:
    """Read traces of ranks and put them on the clock of the first, by the hosts' times of day.

    Raises OSError, or ValueError if a file is no trace of zshard's.
    """
    found: list[RankTrace] = []
    for file in files:
        data = Path(file).read_bytes()
        content = json.loads(gzip.decompress(data) if str(file).endswith(".gz") else data)
        if not isinstance(content, dict) or "zshard" not in content:
            raise ValueError(f"{file} is no trace of zshard's")
        for each in map(lambda fields: RankTrace(**fields), content["zshard"]):
            events = (e for e in content["traceEvents"] if e["ph"] == "X" and e["pid"] == each.rank)
            first = found[0] if found else each
            shift = each.shift if each.host == first.host else each.wall - first.wall
            ranges = [_range_of(event, each.shift) for event in events]
            found.append(each._replace(ranges=ranges, shift=shift))
    return Trace(found)


def _range_of(event: dict[str, Any], shift: int) -> _Range:
    begun = round(event["ts"] * 1e3) - shift
    return event["name"], event["tid"], begun, begun + round(event["dur"] * 1e3)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `trace` to the subparsers of `python -m zshard`."""
    trace = commands.add_parser("trace", help="merge traces of ranks into one, and report on them")
    trace.add_argument("files", nargs="+", help="what ZSHARD_TRACE=file has written, of each rank")
    trace.add_argument("-o", "--out", help="the merged trace to write; .gz compresses it")
    trace.add_argument("--json", action="store_true", help="print the report as JSON")
    trace.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    trace = read(args.files)
    if args.out:
        trace.export(args.out)
    print(trace.to_json() if args.json else trace.report())
    return 0


# --- the report -----------------------------------------------------------------------------------


def parts_of(name: str) -> tuple[str, str, str]:
    """Return the column that counts a range's time, its unit, and for whom it waits; "" if there is
    none."""
    text = name.removeprefix("zshard::")
    if text.startswith(("wait for ", "transfer (")):
        unit = re.search(r"unit '(.*?)'", text)
        whom = re.match(r"wait for (rank \d+|all ranks)", text)
        named = unit[1] if unit else ""
        return "wait", "root" if named == "(root)" else named, whom[1] if whom else "transfer"
    what, _, unit_name = text.partition(" (")
    kind = _KINDS.get(what, "calls")
    return kind or what, unit_name.removesuffix(")"), ""


def own_times(ranges: Iterable[_Range]) -> Iterator[tuple[str, str, str, int]]:
    """Yield each range's column, unit, name, and the nanoseconds of it that are in no range within
    it. A wait that names no unit is that of the range around it."""
    open_: dict[int, list[list[Any]]] = {}  # by thread: [end, column, unit, name, own time]
    for name, thread, begun, ended in sorted(ranges, key=lambda each: (each[2], -each[3])):
        stack = open_.setdefault(thread, [])
        while stack and stack[-1][0] <= begun:
            yield _own_time(stack.pop())
        column, unit, _ = parts_of(name)
        if stack:
            stack[-1][4] -= min(ended, stack[-1][0]) - begun
            unit = unit or stack[-1][2]
        stack.append([ended, column, unit, name, ended - begun])
    for stack in open_.values():
        yield from map(_own_time, stack)


def _own_time(entry: Sequence[Any]) -> tuple[str, str, str, int]:
    _, column, unit, name, nanoseconds = entry
    return column, unit, name, nanoseconds


def _summary_of(trace: RankTrace) -> dict[str, Any]:
    units: dict[str, dict[str, float]] = {}
    waits: dict[tuple[str, str], list[int]] = {}
    for column, unit, name, nanoseconds in own_times(trace.ranges):
        times = units.setdefault(unit, dict.fromkeys(_COLUMNS, 0.0))
        times[column] += nanoseconds / 1e9
        if column == "wait":
            waits.setdefault((unit, name.removeprefix("zshard::")), []).append(nanoseconds)
    exposed = sum(times["wait"] for times in units.values())
    seconds = (trace.ended - trace.begun) / 1e9
    steps = sum(name == "optimizer.step" for name in map(_short, trace.ranges))
    listed: list[dict[str, Any]] = [
        {
            **{"unit": unit, "for": parts_of(what)[2], "what": what, "count": len(each)},
            **{"seconds": sum(each) / 1e9, "longest": max(each) / 1e9},
        }
        for (unit, what), each in waits.items()
    ]
    return {
        **{"rank": trace.rank, "seconds": seconds, "steps": steps},
        **{"exposed_seconds": exposed, "exposed_share": exposed / seconds if seconds else 0.0},
        **{"clock_error_seconds": trace.error / 1e9, "lost": trace.lost},
        "units": [{"unit": unit, **times} for unit, times in units.items()],
        "waits": sorted(listed, key=lambda each: -each["seconds"]),
    }


def _short(each: _Range) -> str:
    return each[0].removeprefix("zshard::")


def _text_of(summary: dict[str, Any]) -> str:
    lines = [
        f"rank {summary['rank']}: {summary['seconds']:.3f} s, {summary['steps']} optimizer steps; "
        f"exposed communication {1e3 * summary['exposed_seconds']:.1f} ms "
        f"({100 * summary['exposed_share']:.1f} %)",
    ]
    width = max([4, *(len(each["unit"]) for each in summary["units"])])
    lines.append(f"{'ms':{width}}" + "".join(f"{column:>10}" for column in _COLUMNS))
    for each in summary["units"]:
        cells = "".join(f"{1e3 * each[column]:10.2f}" for column in _COLUMNS)
        lines.append(f"{each['unit'] or '-':{width}}{cells}")
    for each in summary["waits"][:_MOST_WAITS]:
        lines.append(
            f"{1e3 * each['seconds']:8.2f} ms in {each['count']}, the longest "
            f"{1e3 * each['longest']:.2f} ms: {each['what']}"
        )
    return "\n".join(lines)
