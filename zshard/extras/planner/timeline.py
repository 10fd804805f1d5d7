"""A step in time: the engine's schedule, with durations for what it does.

The engine's dry run says what a step does and in which order (Engine.predict_events). Here it is
played on two resources: the device's stream of kernels, and the wire, on which collectives follow
one another. A collective begins when it is issued and the wire is free; the kernels wait for it
where the schedule does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

COMPUTE, WIRE, WAIT = "compute", "wire", "wait"


class Interval(NamedTuple):
    """The time in which a resource is busy with something, or kernels wait for it. unit: its place,
    or -1 for none."""

    resource: str
    what: str
    unit: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Durations(NamedTuple):
    """Seconds of each part of a step.

    forward, backward: between marks, as in kernels.Traced. owners: the units that they belong to.
    gather, reduce: of each unit.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    owners: Sequence[int]
    gather: Sequence[float]
    reduce: Sequence[float]


class Timeline(NamedTuple):
    """A step. seconds: all of it."""

    spans: list[Interval]
    seconds: float

    @property
    def exposed(self) -> dict[tuple[str, int], float]:
        """Seconds in which kernels wait, by (act, unit)."""
        found: dict[tuple[str, int], float] = {}
        for span in self.spans:
            if span.resource == WAIT:
                key = span.what, span.unit
                found[key] = found.get(key, 0.0) + span.seconds
        return found


def play(
    events: Sequence[tuple[str, int]], marks: Mapping[int, int], durations: Durations
) -> Timeline:
    """Return the timeline of a step.

    events: of Engine.predict_events(). marks: the index of a call -> of the mark that it is.
    """
    player = _Player(durations)
    for act, at in events:
        if act in ("forward", "backward"):
            if at in marks:
                player.reach(act, marks[at])
        else:
            player.do(act, at)
    return player.end()


class _Player:
    def __init__(self, durations: Durations) -> None:
        self._durations = durations
        self._now = self._free = 0.0
        self._backward = False
        self._ends: dict[tuple[str, int], float] = {}
        self.spans: list[Interval] = []

    def reach(self, act: str, mark: int) -> None:
        if act == "forward":
            self._run("forward", mark)
            return
        if not self._backward:
            self._backward = True
            self._run("forward", -1)
        self._run("backward", mark + 1)

    def do(self, act: str, unit: int) -> None:
        if act == "gather":
            self._send("gather", unit, self._durations.gather[unit])
        elif act == "post":
            self._send("reduce", unit, self._durations.reduce[unit])
        else:
            what = "gather" if act == "bind" else "reduce"
            self._wait(what, unit, self._ends.pop((what, unit), 0.0))

    def end(self) -> Timeline:
        self._run("backward", 0)
        for (what, unit), end in self._ends.items():
            self._wait(what, unit, end)
        return Timeline(self.spans, self._now)

    def _run(self, phase: str, segment: int) -> None:
        durations = self._durations
        seconds = (durations.forward if phase == "forward" else durations.backward)[segment]
        if seconds > 0:
            end, unit = self._now + seconds, durations.owners[segment]
            self.spans.append(Interval(COMPUTE, phase, unit, self._now, end))
            self._now = end

    def _send(self, what: str, unit: int, seconds: float) -> None:
        if seconds > 0:
            start = max(self._now, self._free)
            self._free = self._ends[what, unit] = start + seconds
            self.spans.append(Interval(WIRE, what, unit, start, start + seconds))

    def _wait(self, what: str, unit: int, end: float) -> None:
        if end > self._now:
            self.spans.append(Interval(WAIT, what, unit, self._now, end))
            self._now = end
