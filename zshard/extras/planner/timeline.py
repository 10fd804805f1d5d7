"""A step in time: the engine's schedule, with durations for what it does.

The engine's dry run says what a step does and in which order (Engine.predict_events). Here it is
played on two resources: the device's stream of kernels, and the wire, on which collectives follow
one another. A collective begins when it is issued and the wire is free; the kernels wait for it
where the schedule does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

COMPUTE, WIRE, WAIT = "compute", "wire", "wait"
_SENT = {"gather": "gather", "post": "reduce"}  # acts that put something on the wire


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
        seconds: defaultdict[tuple[str, int], float] = defaultdict(float)
        for span in self.spans:
            if span.resource == WAIT:
                seconds[span.what, span.unit] += span.seconds
        return dict(seconds)


def play(
    events: Sequence[tuple[str, int]], marks: Mapping[int, int], durations: Durations
) -> Timeline:
    """Return the timeline of a step.

    events: of Engine.predict_events(). marks: the index of a call -> of the mark that it is.
    """
    player = _Player(durations)
    is_backward = False
    for act, at in events:
        if act == "forward" and at in marks:
            player.run("forward", marks[at])
        elif act == "backward" and at in marks:
            if not is_backward:
                is_backward = True
                player.run("forward", -1)
            player.run("backward", marks[at] + 1)
        elif act in _SENT:
            player.send(_SENT[act], at)
        elif act not in ("forward", "backward"):
            player.wait("gather" if act == "bind" else "reduce", at)
    player.run("backward", 0)
    for what, unit in list(player.ends):
        player.wait(what, unit)
    return Timeline(player.spans, player.now)


class _Player:
    def __init__(self, durations: Durations) -> None:
        self._durations = durations
        self.now = self._free = 0.0
        self.ends: dict[tuple[str, int], float] = {}
        self.spans: list[Interval] = []

    def run(self, phase: str, segment: int) -> None:
        durations = self._durations
        seconds = (durations.forward if phase == "forward" else durations.backward)[segment]
        self._reach(COMPUTE, phase, durations.owners[segment], self.now + seconds)

    def send(self, what: str, unit: int) -> None:
        durations = self._durations
        seconds = (durations.gather if what == "gather" else durations.reduce)[unit]
        if seconds > 0:
            start = max(self.now, self._free)
            self._free = self.ends[what, unit] = start + seconds
            self.spans.append(Interval(WIRE, what, unit, start, start + seconds))

    def wait(self, what: str, unit: int) -> None:
        self._reach(WAIT, what, unit, self.ends.pop((what, unit), 0.0))

    def _reach(self, resource: str, what: str, unit: int, end: float) -> None:
        if end > self.now:
            self.spans.append(Interval(resource, what, unit, self.now, end))
            self.now = end
