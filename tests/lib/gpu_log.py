"""What a training run asked of the stand-ins for CUDA and NCCL, read from their common log: is it in order?

A log says what each stream was given, with the memory that it reads and writes, and
which events tie streams together. From that follows what comes before what on a GPU, whatever the
timing; two accesses to the same bytes of which one writes, in streams that nothing ties together,
are a race, and no kind of race has to be thought of beforehand. So each rule (a swap behind its
packing, a sum behind its swap, a gather behind the optimizer's step and behind the slot's last
reader, computation behind its gather) is the same check.

What torch does with memory of the GPU is written into the log by the test (`mark`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMPUTE = 0  # the number of torch's stream, where a test says nothing else
VARIABLES = ("FAKE_CUDA_LOG", "FAKE_NCCL_LOG")

Line = tuple[str, dict[str, str]]


def start(folder: str, rank: int) -> Path:
    """Has both stand-ins write one log from now on; where it is."""
    path = Path(folder) / f"calls.{rank}"
    for name in VARIABLES:
        os.environ[name] = str(path)
    return path


def stop() -> None:
    """Nothing is written any more."""
    for name in VARIABLES:
        del os.environ[name]


def mark(name: str, **fields: Any) -> None:
    """Writes a line of the test's own; nothing where there is no log."""
    path = os.environ.get(VARIABLES[0])
    if path:
        words = " ".join(f"{key}={value}" for key, value in fields.items())
        with open(path, "a") as log:
            log.write(f"{name} {words}\n")


def mark_use(tensor: Any, how: str, stream: int = COMPUTE) -> None:
    """torch reads ("src") or writes ("dst") this tensor, in its stream."""
    mark("torch", stream=stream, **{how: hex(tensor.data_ptr())}, bytes=tensor.nbytes)


def read(path: Path) -> list[Line]:
    """The calls, in the order in which the host made them."""
    lines = []
    for text in path.read_text().splitlines():
        name, *fields = text.split()
        lines.append((name, dict(each.split("=", 1) for each in fields if "=" in each)))
    return lines


@dataclass
class Step:
    """Something that a stream does."""

    name: str
    stream: int
    number: int  # of its stream's steps, from 1 on
    before: dict[int, int]  # by stream, how many of its steps come before this one for sure
    reads: list[tuple[int, int]]  # from, to
    writes: list[tuple[int, int]]
    line: int

    def follows(self, other: Step) -> bool:
        """Does it come after `other`, however fast either is?"""
        return self.before.get(other.stream, 0) >= other.number


@dataclass
class Order:
    """All steps of a log, and the state of the streams at its end."""

    steps: list[Step] = field(default_factory=list)
    known: dict[int, dict[int, int]] = field(default_factory=dict)  # by stream, as `before`
    counts: dict[int, int] = field(default_factory=dict)  # by stream, of steps
    _events: dict[str, dict[int, int]] = field(default_factory=dict)
    _host: dict[int, int] = field(default_factory=dict)  # what the host has waited for

    def add(self, line: int, name: str, fields: dict[str, str]) -> None:
        """Takes the log's next line."""
        number = fields.get("stream", "")
        stream = int(number) if number.isdecimal() else -1  # a call of NCCL's has an address there
        if name == "cuEventRecord":
            self._events[fields["event"]] = dict(self._of(stream))
        elif name == "cuStreamWaitEvent":
            _merge(self._of(stream), self._events.get(fields["event"], {}))
        elif name == "cuStreamSynchronize":
            _merge(self._host, self._of(stream))
        elif name == "cuMemFree":  # waits for all that there is
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
            writes.append(_range(address, 1))  # how far it goes is not known, but where it begins
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


def _touch(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> bool:
    return any(x[0] < y[1] and y[0] < x[1] for x in a for y in b)


def races(lines: list[Line]) -> list[str]:
    """Pairs of steps on the same bytes, one of them writing, that nothing puts in order; in words."""
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
