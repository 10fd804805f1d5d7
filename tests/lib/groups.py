"""Process groups that a test makes for itself, and is rid of afterwards.

Each gloo group has three threads, which look for something to do a hundred times a second
for as long as it lives; and ranks live for many tests (spawn.py).
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from zshard.ranks import transports

# Longer than a model's timeout: a rank may come to its next group by way of one.
PATIENCE = datetime.timedelta(seconds=60)

_kept: set[Any] = set()


@contextlib.contextmanager
def kept_groups() -> Iterator[None]:
    """Context: the groups made within outlive the task of a pool's ranks, for the next ones."""
    known = set(dist.distributed_c10d._world.pg_map)
    yield
    _kept.update(set(dist.distributed_c10d._world.pg_map) - known)


def end_groups_but(known: set[Any]) -> None:
    """End the groups that a task of a pool's ranks has left: gloo's three threads of each wake a
    hundred times a second. zshard's own for groups that were there before stay."""
    groups = dist.distributed_c10d._world.pg_map
    zshards = [e.made for e in transports._entries.values() if e.group in known | _kept]
    for group in set(groups) - known - _kept - set().union(*zshards):
        dist.destroy_process_group(group)
    transports._drop_dead_entries()


@contextlib.contextmanager
def passing_groups() -> Iterator[None]:
    """Decorator, or context, that destroys the groups made within: the test's, and zshard's beside them."""
    known = set(dist.distributed_c10d._world.pg_map)
    try:
        yield
    finally:
        for group in set(dist.distributed_c10d._world.pg_map) - known:
            dist.destroy_process_group(group)


def own_group() -> Any:
    """A group of all ranks, so that transports are new too: a test may leave them in ruins."""
    return dist.new_group(timeout=PATIENCE)
