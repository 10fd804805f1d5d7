"""Keepers that end with their test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from zshard import KeeperError
from zshard.extras.keeping.client import Keeper, start


@pytest.fixture
def started() -> Iterator[Callable[..., Keeper]]:
    """Start keepers that end with the test."""
    made: list[Keeper] = []

    def begin(*args: int) -> Keeper:
        made.append(Keeper(start(*args)))
        return made[-1]

    yield begin
    for keeper in made:
        with contextlib.suppress(KeeperError):
            keeper.end()


@pytest.fixture
def keeper(started: Callable[..., Keeper]) -> Keeper:
    return started()


@pytest.fixture
def token(keeper: Keeper) -> str:
    """The token of a keeper."""
    return keeper.token
