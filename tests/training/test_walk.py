"""Scripts that catch an exception and continue, compared with DDP: see tests/training/walk.py."""

from __future__ import annotations

import functools

import pytest
from spawn import RankFailure, RankPool
from walk import PLACES, Cell, all_cells, hash_of, pairwise, plain, sharded, verdict

SHARES = 24  # tests that the sample is cut into


@functools.cache
def sample() -> list[Cell]:
    return pairwise(all_cells())


def walk(pool: RankPool, cells: list[Cell]) -> list[str]:
    """A line for each cell in which something is wrong."""
    found = []
    for cell in cells:
        try:
            ours, theirs = pool.run(sharded, cell, timeout=60), plain(cell)
            if verdict(cell, ours, theirs) and "timed out" in str(ours):
                ours = pool.run(sharded, cell, 20.0)  # the machine may have stalled
            wrong = verdict(cell, ours, theirs)
        except RankFailure as failure:  # a hang, or a crash
            wrong = str(failure)[-2000:]
        if wrong:
            found.append(f"{cell}: {wrong}")
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("share", range(SHARES))
def test_failures_match_ddp(pool2, share):
    assert walk(pool2, sample()[share::SHARES]) == []


@pytest.mark.thorough
@pytest.mark.parametrize("where", PLACES)
def test_all_failures_on_all_ranks(pool2, where):
    assert walk(pool2, [c for c in all_cells() if c.where == where and c.who == "all"]) == []


@pytest.mark.thorough
@pytest.mark.parametrize("where", PLACES)
def test_failures_on_one_rank(pool2, where):
    """Every tenth of them: most wait until the deadline, and all would take nine hours."""
    cells = [c for c in all_cells() if c.where == where and c.who == "one"]
    assert walk(pool2, sorted(cells, key=hash_of)[::10]) == []
