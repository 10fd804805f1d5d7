"""What a rank takes of its process's limits as ranks grow in number, for `python -m zshard doctor`.

The numbers come from the code that allocates: the transport's own count of what it
needs, and a dry run of a model of UNITS units.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from zshard import _core
from zshard.memory.dry_run import World
from zshard.memory.host_limits import max_map_count
from zshard.memory.report import dry_run_of
from zshard.precision import Precision, in_dtype
from zshard.strategy import ShardingStrategy
from zshard.units.units import Options, Prefetch
from zshard.wrap import plan_units

UNITS = 100
RANKS = (8, 16, 32, 64, 128)
_CONNECTIONS = 2  # a model's, and that of checkpoints


class Needs(NamedTuple):
    """What one rank takes. open_files: torch's process group among them, a connection per rank.
    address_space: bytes, without the model's own."""

    ranks: int
    open_files: int
    mappings: int
    mixed_mappings: int
    address_space: int


def needs_of(ranks: int) -> Needs:
    """Return what a rank needs to train a model of UNITS units over shm and to save checkpoints."""
    shm = _core.Comm.shm_needs(ranks)
    fixed = _CONNECTIONS * shm["mappings"]
    return Needs(
        ranks,
        _CONNECTIONS * shm["descriptors"] + ranks,
        fixed + _mappings(ranks, mixed=False),
        fixed + _mappings(ranks, mixed=True),
        _CONNECTIONS * shm["bytes"],
    )


def _mappings(ranks: int, mixed: bool) -> int:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(UNITS)])
    precision = in_dtype(torch.bfloat16) if mixed else Precision()
    options = Options(ShardingStrategy.FULL_SHARD, precision, Prefetch())
    planned = [(spec, options) for spec in plan_units(model, {nn.Linear})]
    dry = dry_run_of(model, planned, World(ranks, ranks, "shm", "shm"))
    return dry.engine.predict_mappings()


def lines() -> Iterator[str]:
    """Yield the lines of a table, with this process's limits below."""
    yield (
        f"Each rank of one host takes, over shm, with a model of {UNITS} units and its checkpoints:"
    )
    yield "ranks  open files  mappings  (mixed precision)  address space"
    for each in map(needs_of, RANKS):
        yield (
            f"{each.ranks:>5}  {each.open_files:>10}  {each.mappings:>8}  "
            f"{each.mixed_mappings:>17}  {each.address_space / 2**30:>9.1f} GiB"
        )
    files, maps, space = _limit("RLIMIT_NOFILE"), max_map_count(), _limit("RLIMIT_AS")
    size = "unlimited" if space is None else f"{space / 2**30:.1f} GiB"
    yield (
        f"limit  {_words(files):>10}  {_words(maps):>8}  {_words(maps):>17}  {size:>13}  "
        "(ulimit -n, vm.max_map_count, ulimit -v)"
    )


def _limit(name: str) -> int | None:
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


def _words(limit: int | None) -> str:
    return "unlimited" if limit is None else str(limit)
