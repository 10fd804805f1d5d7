"""Sample tests that are too long for every run: `@pytest.mark.sampled(5)`.

Each run executes a few of a test's cases, chosen to cover as many values of its parameters as
possible. The others are marked `thorough`, and run with those. A test on several ranks takes half a
second per case, so it is always sampled: one case, different from test to test, so that each
strategy and transport is used in many tests.
"""

from __future__ import annotations

import zlib
from collections import defaultdict

import pytest

ON_RANKS = 1  # cases of a test on ranks, unless it sets another number


def leave_to_thorough(items: list[pytest.Item]) -> None:
    """Mark as thorough the cases that the samples omit."""
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        is_left = item.get_closest_marker("thorough") is not None
        if isinstance(item, pytest.Function) and not is_left and size_of(item) is not None:
            tests[item.nodeid.split("[")[0]].append(item)
    for cases in tests.values():
        sample = sample_of(cases, size_of(cases[0]) or 0)
        for case in cases:
            if case not in sample:
                case.add_marker(pytest.mark.thorough)


def size_of(case: pytest.Item) -> int | None:
    """Return how many cases of its test run each time; None: all."""
    mark = case.get_closest_marker("sampled")
    if mark is not None:
        return int(mark.args[0])
    return ON_RANKS if on_ranks(case) else None


def on_ranks(case: pytest.Item) -> bool:
    """Return whether a test uses a pool of ranks, or its module starts some."""
    names: list[str] = getattr(case, "fixturenames", [])
    module = getattr(case, "module", None)
    starters = ("fork_ranks", "run_ranks")
    return any(name.startswith("pool") for name in names) or any(
        hasattr(module, name) for name in starters
    )


def sample_of(cases: list[pytest.Function], size: int) -> list[pytest.Function]:
    """Choose `size` of the cases of one test, the same each time.

    Greedy: the case whose parameters' values have occurred least is next.
    """
    seen: dict[tuple[str, str], int] = defaultdict(int)
    pool = sorted(cases, key=lambda case: zlib.crc32(case.nodeid.encode()))
    taken = []
    while pool and len(taken) < size:
        best = min(pool, key=lambda case: sum(seen[value] for value in values_of(case)))
        pool.remove(best)
        taken.append(best)
        for value in values_of(best):
            seen[value] += 1
    return taken


def values_of(case: pytest.Function) -> set[tuple[str, str]]:
    """Return the values of a case's parameters, by name."""
    spec = getattr(case, "callspec", None)
    return (
        {(name, repr(value)) for name, value in spec.params.items()} if spec is not None else set()
    )
