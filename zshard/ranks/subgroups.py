"""New process groups of some of the ranks, created by these ranks alone.

Such a group needs a name that its ranks choose alike, and that no group had before,
not even one that has been destroyed: the store still has the addresses of its ranks. torch derives
the name from the number of groups that a rank is in. That number falls when a group is destroyed,
and the ranks of a group may be in more or fewer others. The number of times that these same ranks
created a group is equal on all of them, and only rises.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_created: Counter[tuple[int, ...]] = Counter()


def new_subgroup(ranks: Sequence[int], backend: str | None = None) -> Any:
    """Return a new process group of these ranks of the world. Collective over them alone.

    backend: such as "gloo". None: that of the world.
    """
    key = tuple(sorted(ranks))
    _created[key] += 1
    text = f"zshard {'_'.join(map(str, key))} {_created[key]}"
    with _named(hashlib.sha256(text.encode()).hexdigest()):
        return dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Within it, torch gives `name` to a group that only its own ranks create."""
    usual = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = usual
