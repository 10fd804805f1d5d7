"""A planned step beside measured ones: unit by unit, and in one trace."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from zshard.planner.prediction import Prediction
from zshard.planner.timeline import WAIT, WIRE
from zshard.trace import RankTrace, Trace, own_times

COLUMNS = ("forward", "backward", "wait", "other")
PLAN, STEP = "plan", "optimizer.step"
KERNELS, WIRES = 0, -1  # threads of the plan

Times = Mapping[str, Mapping[str, float]]
"""Unit -> column -> seconds of a step."""


class Beside(NamedTuple):
    """What beside() found. planned, measured: the measured are means over steps and ranks. trace:
    the measured trace, and the planned step as one more rank."""

    planned: Times
    measured: Times
    trace: Trace

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        units = list(dict.fromkeys([*self.measured, *self.planned]))
        width = max(len("planned / measured ms"), *map(len, units))
        titles = "".join(f"{column:>20}" for column in (*COLUMNS, "error"))
        yield f"{'planned / measured ms':{width}}{titles}"
        for unit in units:
            planned, measured = self.planned.get(unit, {}), self.measured.get(unit, {})
            yield f"{unit or '-':{width}}" + "".join(_cells(planned, measured))
        totals = [_summed(times) for times in (self.planned, self.measured)]
        yield f"{'all':{width}}" + "".join(_cells(*totals))


def _cells(planned: Mapping[str, float], measured: Mapping[str, float]) -> Iterator[str]:
    for column in COLUMNS:
        ours, theirs = (1e3 * each.get(column, 0.0) for each in (planned, measured))
        yield f"{f'{ours:.2f} / {theirs:.2f}':>20}"
    ours, theirs = sum(planned.values()), sum(measured.values())
    yield f"{f'{1e3 * (ours - theirs):+.2f}':>20}"


def _summed(times: Times) -> dict[str, float]:
    return {c: sum(each.get(c, 0.0) for each in times.values()) for c in COLUMNS}


def beside(trace: Trace, prediction: Prediction) -> Beside:
    """Compare a planned step with measured ones.

    Args:
        trace: of zshard.profile(), with whole steps of the planned model.
        prediction: one of zshard.plan(...).predictions, or its `best`.

    `str()` of the result is a table: each unit's milliseconds in a step, and by how much the plan
    is off. Its `trace` can be exported, and has the planned step as one more rank. Time that is in
    no range of a rank does not count, so the rows' sum is less than a step.

    Raises ValueError if the trace has no optimizer step.
    """
    planned = as_rank(prediction, trace)
    return Beside(_mean([planned]), _mean(trace.ranks), Trace([*trace.ranks, planned]))


def _mean(ranks: Sequence[RankTrace]) -> dict[str, dict[str, float]]:
    found: defaultdict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(COLUMNS, 0.0))
    for each in ranks:
        steps = sum(name.removeprefix("zshard::") == STEP for name, *_ in each.ranges)
        if not steps:
            raise ValueError(
                f"the trace of rank {each.rank} has no optimizer step: trace whole steps"
            )
        own = [range_ for range_ in each.ranges if range_[1] != WIRES]
        for column, unit, _, nanoseconds in own_times(own):
            place = column if column in COLUMNS else "other"
            found[unit][place] += nanoseconds / 1e9 / steps / len(ranks)
    return dict(found)


def as_rank(prediction: Prediction, trace: Trace) -> RankTrace:
    """Return the planned step as the trace of one more rank, which begins with the first."""
    first = trace.ranks[0]
    begun = min((begun for _, _, begun, _ in first.ranges), default=first.begun) + first.shift
    ranges = [
        (name, thread, begun + round(1e9 * start), begun + round(1e9 * end))
        for name, thread, start, end in _ranges(prediction)
    ]
    ended = begun + round(1e9 * prediction.seconds)
    return RankTrace(len(trace.ranks), PLAN, KERNELS, begun, ended, 0, 0, ranges)


def _ranges(prediction: Prediction) -> Iterator[tuple[str, int, float, float]]:
    """Yield names as a trace has them, threads, and seconds from the step's begin."""
    line, times = prediction.timeline, prediction.way.accumulate
    for begun, span in itertools.product((k * line.seconds for k in range(times)), line.spans):
        unit = "" if span.unit < 0 else prediction.units[span.unit]
        name = f"{span.what} ({unit})"
        if span.resource == WAIT:
            name = f"wait for all ranks ({span.what} of unit '{unit}')"
        thread = WIRES if span.resource == WIRE else KERNELS
        yield name, thread, begun + span.start, begun + span.end
    yield STEP, KERNELS, times * line.seconds, prediction.seconds
