"""Process groups that a test makes for itself, and is rid of afterwards.

The one idea: each gloo group has three threads, which look for something to do a hundred times a second
for as long as it lives; and ranks live for many tests (spawn.py).
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

# Longer than a model's timeout: a rank may come to its next group by way of one.
PATIENCE = datetime.timedelta(seconds=60)


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
