"""Process groups that a test creates and destroys.

Each gloo group has three threads, which poll a hundred times a second as long as it lives, and
ranks live for many tests (spawn.py).
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from zshard.ranks import transports

# Longer than a model's timeout: an error may delay a rank on its way to the next group.
PATIENCE = datetime.timedelta(seconds=60)

_kept: set[Any] = set()


@contextlib.contextmanager
def kept_groups() -> Iterator[None]:
    """Context manager: groups created within it outlive the task of a pool's ranks, for the next
    ones."""
    known = set(dist.distributed_c10d._world.pg_map)
    yield
    _kept.update(set(dist.distributed_c10d._world.pg_map) - known)


def end_groups_but(known: set[Any]) -> None:
    """End the groups that a task of a pool's ranks has left: each of gloo's has three threads that
    wake a hundred times a second. zshard's own groups for earlier ones stay."""
    groups = dist.distributed_c10d._world.pg_map
    zshards = [e.made for e in transports._entries.values() if e.group in known | _kept]
    for group in set(groups) - known - _kept - set().union(*zshards):
        dist.destroy_process_group(group)
    transports._drop_dead_entries()


@contextlib.contextmanager
def passing_groups() -> Iterator[None]:
    """Decorator or context manager that destroys the groups created within it: the test's, and
    zshard's for them."""
    known = set(dist.distributed_c10d._world.pg_map)
    try:
        yield
    finally:
        for group in set(dist.distributed_c10d._world.pg_map) - known:
            dist.destroy_process_group(group)


def own_group() -> Any:
    """Return a group of all ranks, so that transports are new too: a test may leave them broken."""
    return dist.new_group(timeout=PATIENCE)
