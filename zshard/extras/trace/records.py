"""What ranks have recorded, and the file of it: a Chrome trace, which ui.perfetto.dev opens."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

Range = tuple[str, int, int, int]  # name, thread, begin, end: nanoseconds of CLOCK_MONOTONIC
Memory = tuple[str, int, dict[str, int]]  # of a model, from this time on: bytes by part

_NOTE = "zshard::memory "  # csrc/engine/usage.c


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
    ranges: list[Range]
    memory: Iterable[Memory] = ()
    shift: int = 0
    error: int = 0


def apart(recorded: Iterable[Range]) -> tuple[list[Range], list[Memory]]:
    """Separate ranges from notes of memory, which the core records as ranges too."""
    ranges, memory = [], []
    for each in recorded:
        name, _, begun, _ = each
        if not name.startswith(_NOTE):
            ranges.append(each)
            continue
        numbers, _, model = name.removeprefix(_NOTE).partition(" of ")
        parts = {part: int(number) for part, number in re.findall(r"(\w+)=(\d+)", numbers)}
        memory.append((model, begun, parts))
    return ranges, memory


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
    for model, at, parts in trace.memory:
        yield {
            **{"ph": "C", "cat": "zshard", "name": f"memory of {model}"},
            **{"pid": trace.rank, "ts": (at + trace.shift) / 1e3, "args": parts},
        }


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def write_ranks(file: str | os.PathLike[str], ranks: Iterable[RankTrace]) -> None:
    """Write the file; compressed if the name ends in .gz. Raises OSError."""
    ranks = list(ranks)
    data = json.dumps(
        {
            "displayTimeUnit": "ms",
            "traceEvents": [event for each in ranks for event in _events_of(each)],
            "zshard": [each._replace(ranges=[], memory=[])._asdict() for each in ranks],
        }
    )
    path = Path(file)
    zipped = path.suffix == ".gz"
    path.write_bytes(gzip.compress(data.encode(), 1) if zipped else data.encode())


def read_ranks(files: Iterable[str | os.PathLike[str]]) -> list[RankTrace]:
    """See trace.read()."""
    found: list[RankTrace] = []
    for file in files:
        data = Path(file).read_bytes()
        content = json.loads(gzip.decompress(data) if str(file).endswith(".gz") else data)
        if not isinstance(content, dict) or "zshard" not in content:
            raise ValueError(f"{file} is no trace of zshard's")
        for each in map(lambda fields: RankTrace(**fields), content["zshard"]):
            own = [event for event in content["traceEvents"] if event["pid"] == each.rank]
            first = found[0] if found else each
            shift = each.shift if each.host == first.host else each.wall - first.wall
            ranges = [_range_of(event, each.shift) for event in own if event["ph"] == "X"]
            memory = [_memory_of(event, each.shift) for event in own if event["ph"] == "C"]
            found.append(each._replace(ranges=ranges, memory=memory, shift=shift))
    return found


def _time_of(event: Mapping[str, Any], shift: int) -> int:
    begun: int = round(event["ts"] * 1e3)
    return begun - shift


def _range_of(event: Mapping[str, Any], shift: int) -> Range:
    begun = _time_of(event, shift)
    return event["name"], event["tid"], begun, begun + round(event["dur"] * 1e3)


def _memory_of(event: Mapping[str, Any], shift: int) -> Memory:
    return event["name"].removeprefix("memory of "), _time_of(event, shift), event["args"]
