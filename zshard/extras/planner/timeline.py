"""A step in time: the engine's schedule, with durations for what it does.

The engine's dry run says what a step does and in which order (Engine.predict_events). Here it is
played on two resources: the device's stream of kernels, and the wire, on which collectives follow
one another. A collective begins when it is issued and the wire is free; the kernels wait for it
where the schedule does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

_SENT = {"gather": "gather", "post": "reduce"}  # acts that put something on the wire


class Durations(NamedTuple):
    """Seconds of each part of a step.

    forward, backward: between marks, as in kernels.Traced. gather, reduce: of each unit.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    gather: Sequence[float]
    reduce: Sequence[float]


class Timeline(NamedTuple):
    """A step. seconds: all of it. exposed: those in which kernels wait, by (act, unit)."""

    seconds: float
    exposed: dict[tuple[str, int], float]


def play(
    events: Sequence[tuple[str, int]], marks: Mapping[int, int], durations: Durations
) -> Timeline:
    """Return the timeline of a step.

    events: of Engine.predict_events(). marks: the index of a call -> of the mark that it is.
    """
    now = free = 0.0
    ends: dict[tuple[str, int], float] = {}  # of what is on the wire
    exposed: dict[tuple[str, int], float] = {}

    def wait(what: str, unit: int) -> None:
        nonlocal now
        late = ends.pop((what, unit), 0.0) - now
        if late > 0.0:
            exposed[what, unit] = exposed.get((what, unit), 0.0) + late
            now += late

    is_backward = False
    for act, at in events:
        if act == "forward" and at in marks:
            now += durations.forward[marks[at]]
        elif act == "backward" and at in marks:
            if not is_backward:
                is_backward = True
                now += durations.forward[-1]
            now += durations.backward[marks[at] + 1]
        elif act in _SENT:
            what = _SENT[act]
            seconds = (durations.gather if what == "gather" else durations.reduce)[at]
            if seconds > 0:
                free = ends[what, at] = max(now, free) + seconds
        elif act not in ("forward", "backward"):
            wait("gather" if act == "bind" else "reduce", at)
    now += durations.backward[0]
    for what, unit in list(ends):
        wait(what, unit)
    return Timeline(now, exposed)
