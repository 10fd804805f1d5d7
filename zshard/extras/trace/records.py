"""Recorded ranges of ranks, and their file: a Chrome trace, which ui.perfetto.dev opens."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

Range = tuple[str, int, int, int]  # name, thread, begin, end: nanoseconds of CLOCK_MONOTONIC
Memory = tuple[str, int, dict[str, int]]  # of a model, from this time on: bytes by part

_NOTE = "zshard::memory "  # csrc/engine/usage.c


class RankTrace(NamedTuple):
    """Ranges that one rank recorded. wall: nanoseconds from its clock to the time of day. shift:
    from its clock to that of the trace; error: the largest error of that."""

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
    threads = {thread: f"thread {thread}" for thread in sorted({r[1] for r in trace.ranges})}
    if trace.process in threads:
        threads[trace.process] = "main"
    yield _named("process_name", trace.rank, 0, f"rank {trace.rank} on {trace.host}")
    for thread, name in threads.items():
        yield _named("thread_name", trace.rank, thread, name)
    for name, thread, begun, ended in trace.ranges:
        event = {"ph": "X", "cat": "zshard", "name": name.removeprefix("zshard::")}
        times = {"ts": (begun + trace.shift) / 1e3, "dur": (ended - begun) / 1e3}
        yield {**event, "pid": trace.rank, "tid": thread, **times}
    for model, at, parts in trace.memory:
        event = {"ph": "C", "cat": "zshard", "name": f"memory of {model}"}
        yield {**event, "pid": trace.rank, "ts": (at + trace.shift) / 1e3, "args": parts}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def write_ranks(file: str | os.PathLike[str], ranks: Iterable[RankTrace]) -> None:
    """Write the file; compressed if the name ends in .gz. Raises OSError."""
    ranks = list(ranks)
    content = {
        "displayTimeUnit": "ms",
        "traceEvents": [event for each in ranks for event in _events_of(each)],
        "zshard": [each._replace(ranges=[], memory=[])._asdict() for each in ranks],
    }
    path, data = Path(file), json.dumps(content).encode()
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)


def read_ranks(files: Iterable[str | os.PathLike[str]]) -> list[RankTrace]:
    """See trace.read()."""
    traces: list[RankTrace] = []
    for file in files:
        data = Path(file).read_bytes()
        content = json.loads(gzip.decompress(data) if str(file).endswith(".gz") else data)
        if not isinstance(content, dict) or "zshard" not in content:
            raise ValueError(f"{file} is no trace of zshard's")
        for fields in content["zshard"]:
            trace = RankTrace(**fields)
            ranges: list[Range] = []
            memory: list[Memory] = []
            for event in content["traceEvents"]:
                if event["pid"] != trace.rank or event["ph"] not in ("X", "C"):
                    continue
                name, begun = event["name"], round(event["ts"] * 1e3) - trace.shift
                if event["ph"] == "X":
                    ranges.append((name, event["tid"], begun, begun + round(event["dur"] * 1e3)))
                else:
                    memory.append((name.removeprefix("memory of "), begun, event["args"]))
            first = traces[0] if traces else trace
            shift = trace.shift if trace.host == first.host else trace.wall - first.wall
            traces.append(trace._replace(ranges=ranges, memory=memory, shift=shift))
    return traces
