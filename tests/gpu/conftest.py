"""Fixtures for the tests of GPUs: ranks by kind of device (see gpus.py), for as long as the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gpus import KINDS, Start, standing_ranks
from spawn import RankPool


@pytest.fixture(scope="session")
def start() -> Iterator[Start]:
    """Starts standing ranks."""
    with standing_ranks() as found:
        yield found


@pytest.fixture(params=KINDS)
def one(request: pytest.FixtureRequest, start: Start) -> RankPool:
    """A rank that is alone on its device."""
    return start(request.param)
