"""How much of its process's limits a rank takes as the number of ranks grows, for `python -m zshard
doctor`.

The numbers come from the code that allocates: the transport's own count, and a dry run of a model
of UNITS units.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator

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
_CONNECTIONS = 2  # the model's, and that of checkpoints


def _mappings(ranks: int, precision: Precision) -> int:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(UNITS)])
    options = Options(ShardingStrategy.FULL_SHARD, precision, Prefetch())
    planned = [(spec, options) for spec in plan_units(model, {nn.Linear})]
    dry = dry_run_of(model, planned, World(ranks, ranks, "shm", "shm"))
    return dry.engine.predict_mappings()


def lines() -> Iterator[str]:
    """Yield the lines of a table, with this process's limits at the end."""
    yield (
        f"Each rank of one host takes, over shm, with a model of {UNITS} units and its checkpoints:"
    )
    yield "ranks  open files  mappings  (mixed precision)  address space"
    for ranks in RANKS:
        shm = _core.Comm.shm_needs(ranks)
        files = _CONNECTIONS * shm["descriptors"] + ranks  # torch's process group: one per rank
        fixed = _CONNECTIONS * shm["mappings"]
        plain, mixed = (
            fixed + _mappings(ranks, each) for each in (Precision(), in_dtype(torch.bfloat16))
        )
        space = _CONNECTIONS * shm["bytes"] / 2**30  # without the model's own
        yield f"{ranks:>5}  {files:>10}  {plain:>8}  {mixed:>17}  {space:>9.1f} GiB"
    open_files, maps = _limit("RLIMIT_NOFILE"), max_map_count() or "unlimited"
    address_space = _limit("RLIMIT_AS")
    size = address_space if isinstance(address_space, str) else f"{address_space / 2**30:.1f} GiB"
    yield (
        f"limit  {open_files:>10}  {maps:>8}  {maps:>17}  {size:>13}  "
        "(ulimit -n, vm.max_map_count, ulimit -v)"
    )


def _limit(name: str) -> int | str:
    soft, _ = resource.getrlimit(getattr(resource, name))
    return "unlimited" if soft == resource.RLIM_INFINITY else soft
