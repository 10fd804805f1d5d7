"""Keepers that end with their test, and a process to watch."""

from __future__ import annotations

import contextlib
import subprocess
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


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[bytes]]:
    """A process to watch."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()
