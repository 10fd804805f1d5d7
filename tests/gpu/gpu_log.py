"""Check the order of a training run's requests to the fakes of CUDA and NCCL, from their common
log.

A log lists each stream's work, with the memory that it reads and writes, and the events that order
streams. From that follows the order on a GPU, for any timing. Two accesses to the same bytes,
at least one a write, in streams without an order between them are a race. So each rule (a swap
after its packing, a sum after its swap, a gather after the optimizer's step and after the slot's
last reader, computation after its gather) is the same check, and no kind of race has to be
anticipated.

Tests write what torch does with GPU memory into the log (`mark`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMPUTE = 0  # the number of torch's stream, by default
VARIABLES = ("FAKE_CUDA_LOG", "FAKE_NCCL_LOG")

Line = tuple[str, dict[str, str]]


def start(folder: str, rank: int) -> Path:
    """Make both fakes write one log from now on; return its path."""
    path = Path(folder) / f"calls.{rank}"
    for name in VARIABLES:
        os.environ[name] = str(path)
    return path


def stop() -> None:
    """Stop writing."""
    for name in VARIABLES:
        del os.environ[name]


@contextlib.contextmanager
def written(folder: str) -> Iterator[Path]:
    """Have both fakes write this rank's log within; give its path."""
    yield start(folder, int(os.environ["RANK"]))
    stop()


def mark(name: str, **fields: Any) -> None:
    """Write a line of the test's own; no effect without a log."""
    path = os.environ.get(VARIABLES[0])
    if path:
        words = " ".join(f"{key}={value}" for key, value in fields.items())
        with open(path, "a") as log:
            log.write(f"{name} {words}\n")


def mark_use(tensor: Any, how: str, stream: int = COMPUTE) -> None:
    """Note that torch reads ("src") or writes ("dst") this tensor, in its stream."""
    mark("torch", stream=stream, **{how: hex(tensor.data_ptr())}, bytes=tensor.nbytes)


def read(path: Path) -> list[Line]:
    """Return the calls, in the order in which the host made them."""
    lines = []
    for text in path.read_text().splitlines():
        name, *fields = text.split()
        lines.append((name, dict(each.split("=", 1) for each in fields if "=" in each)))
    return lines


@dataclass
class Step:
    """An action of a stream."""

    name: str
    stream: int
    number: int  # in its stream, from 1 on
    before: dict[int, int]  # by stream, how many of its steps certainly come before this one
    reads: list[tuple[int, int]]  # from, to
    writes: list[tuple[int, int]]
    line: int

    def follows(self, other: Step) -> bool:
        """Return whether it comes after `other`, for any timing."""
        return self.before.get(other.stream, 0) >= other.number


@dataclass
class Order:
    """All steps of a log, and the state of the streams at its end."""

    steps: list[Step] = field(default_factory=list)
    known: dict[int, dict[int, int]] = field(default_factory=dict)  # by stream, as `before`
    counts: dict[int, int] = field(default_factory=dict)  # by stream, of steps
    _events: dict[str, dict[int, int]] = field(default_factory=dict)
    _host: dict[int, int] = field(default_factory=dict)  # waited for by the host

    def add(self, line: int, name: str, fields: dict[str, str]) -> None:
        """Process the log's next line."""
        number = fields.get("stream", "")
        stream = int(number) if number.isdecimal() else -1  # a call of NCCL's has an address there
        if name == "cuEventRecord":
            self._events[fields["event"]] = dict(self._of(stream))
        elif name == "cuStreamWaitEvent":
            _merge(self._of(stream), self._events.get(fields["event"], {}))
        elif name == "cuStreamSynchronize":
            _merge(self._host, self._of(stream))
        elif name == "cuMemFree":  # waits for everything
            for each in self.known.values():
                _merge(self._host, each)
        elif {"touches", "src", "dst"} & fields.keys():
            self._step(line, name, stream, fields)

    def _of(self, stream: int) -> dict[int, int]:
        return self.known.setdefault(stream, {})

    def _step(self, line: int, name: str, stream: int, fields: dict[str, str]) -> None:
        known = self._of(stream)
        _merge(known, self._host)
        size = int(fields.get("bytes", "1"))
        reads = [_range(fields["src"], size)] if "src" in fields else []
        writes = [_range(fields["dst"], size)] if "dst" in fields else []
        for address in filter(None, fields.get("touches", "").split(",")):
            writes.append(_range(address, 1))  # its length is unknown, but not where it begins
        name = fields.get("kernel", fields.get("call", name))
        number = self.counts[stream] = self.counts.get(stream, 0) + 1
        self.steps.append(Step(name, stream, number, dict(known), reads, writes, line))
        known[stream] = number


def _merge(into: dict[int, int], other: dict[int, int]) -> None:
    for stream, count in other.items():
        into[stream] = max(into.get(stream, 0), count)


def _range(address: str, size: int) -> tuple[int, int]:
    first = int(address, 16)
    return first, first + size


def order_of(lines: list[Line]) -> Order:
    order = Order()
    for number, (name, fields) in enumerate(lines):
        order.add(number, name, fields)
    return order


def without_waits(lines: list[Line], stream: int) -> list[Line]:
    """Return the log without that stream's waits for others: races must be found in it."""
    wait = "cuStreamWaitEvent", str(stream)
    return [line for line in lines if (line[0], line[1].get("stream")) != wait]


def unjoined(order: Order) -> set[int]:
    """Return the side streams for whose last step torch's stream does not wait."""
    known = order.known.get(COMPUTE, {})
    return {stream for stream, n in order.counts.items() if stream and known.get(stream, 0) < n}


def _touch(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> bool:
    return any(x[0] < y[1] and y[0] < x[1] for x in a for y in b)


def races(lines: list[Line]) -> list[str]:
    """Describe pairs of unordered steps on the same bytes, at least one of them a write."""
    steps, found = order_of(lines).steps, []
    for i, late in enumerate(steps):
        for early in steps[:i]:
            if early.stream == late.stream or late.follows(early):
                continue
            clash = _touch(late.writes, early.reads + early.writes)
            if clash or _touch(late.reads, early.writes):
                found.append(
                    f"{late.name} (stream {late.stream}, line {late.line}) does not wait for "
                    f"{early.name} (stream {early.stream}, line {early.line})"
                )
    return found
