"""Check at wrap time, before anything changes, whether a model fits in memory.

Layouts determine how much zshard will allocate, so a model that cannot fit is an error on all
ranks, with numbers, instead of a process that the kernel kills some steps later.
Only certain allocations count. A module's parameters are in memory already and are freed as their
units are made, so that memory is not needed twice.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from zshard import _core
from zshard._logger import log
from zshard.memory.dry_run import DryRun, World, dry_comms, world_of
from zshard.memory.host_limits import Room, Sharing, divided, left_on_host, room_of_mappings
from zshard.ranks.agreement import warn_on_rank_0
from zshard.ranks.devices import torch_device
from zshard.ranks.groups import _env_int
from zshard.ranks.meeting import host_id
from zshard.ranks.transports import Comms
from zshard.units.units import State
from zshard.wrap.tree import UnitSpec

_MIB = 1 << 20
_MESSAGE = 512  # bytes, for a _RankNeed


class _RankNeed(NamedTuple):
    """Bytes that a rank needs and has left. optimizer: of Adam's state. mappings: the memory
    mappings that it needs, and that it has left. host, cgroup: equal for ranks that share them.
    local: the ranks of its host, as the launcher says. left: Rooms."""

    needed: int
    optimizer: int
    mappings: tuple[int, int]
    host: str
    cgroup: str
    local: int
    left: Sequence[tuple[int, str]]


# What a rank lacks under its tightest limit, in bytes: (`needed` - `limit`, rank, needed, limit,
# the limit's name, Adam's state on that rank).
_Shortage = tuple[int, int, int, int, str, int]


def check_fits(
    module: nn.Module,
    specs: Sequence[UnitSpec],
    comms: Comms,
    inner: Sequence[tuple[nn.Module, State]],
    device: str,
) -> Sharing:
    """Raise MemoryError on all ranks if `module` does not fit in the memory of one of them; warn on
    rank 0 if it will not fit with the optimizer's state. Collective: one exchange.

    inner: units of earlier calls that become part of the model.

    Returns how many ranks share what this rank's host and control group leave.
    """
    world, options, comm = world_of(comms), specs[-1].options, comms.all
    dry_run = DryRun(module, specs, dry_comms(world, options.strategy, comm.rank), inner)
    # Steps in backward do not hold gradients, and such models train like that.
    parts = dry_run.engine.predict(options.offload is not None)
    needed, (left, cgroup), gpu = parts["total"], left_on_host(), torch_device(device)
    if isinstance(options.limit, int):
        left = [Room(options.limit, "memory_limit")]
    else:
        needed = _needed(specs, dry_run, needed - parts["transport"], gpu)
        if gpu.type == "cuda":
            left = [Room(room_of_gpu(gpu), "free GPU memory")]
    mappings = room_of_mappings()
    need = _RankNeed(
        needed,
        2 * dry_run.trained_bytes(),
        (dry_run.engine.predict_mappings(), sys.maxsize if mappings is None else mappings),
        hashlib.sha256(host_id().encode()).hexdigest()[:32],
        cgroup,
        _env_int("LOCAL_WORLD_SIZE") or 1,
        left,
    )
    messages = comm.exchange(json.dumps(need).encode().ljust(_MESSAGE))
    needs = [_RankNeed(*json.loads(each)) for each in messages]
    _log_room(comm.rank, needs)
    missing, rank = max((n.mappings[0] - n.mappings[1], rank) for rank, n in enumerate(needs))
    if missing > 0:
        raise MemoryError(
            f"this {type(module).__name__} needs too many memory mappings: rank {rank} of "
            f"{len(needs)} needs {needs[rank].mappings[0]}, and the kernel allows "
            f"{needs[rank].mappings[1]} more: raise vm.max_map_count, or use fewer units "
            '(auto_wrap_policy) or transport="c10d"'
        )
    for with_optimizer in (False, True):
        shortage = max(_shortages(needs, with_optimizer), default=None)
        if shortage is not None and shortage[0] > 0:
            text = _explain(dry_run, world, shortage, with_optimizer)
            if not with_optimizer:
                raise MemoryError(text)
            warn_on_rank_0(comm, text, RuntimeWarning)
    return _sharing(needs, comm.rank)


def _log_room(rank: int, needs: Sequence[_RankNeed]) -> None:
    need, sharing = needs[rank], _sharing(needs, rank)
    room = min(divided([Room(*each) for each in need.left], sharing), default=None)
    left = "unknown" if room is None else f"{_mib(room.bytes)} MiB, {room.source}"
    text = "memory to allocate: %s MiB, and for Adam's state %s MiB; left: %s"
    log.common(rank, text, _mib(need.needed), _mib(need.optimizer), left)


def _sharing(needs: Sequence[_RankNeed], rank: int) -> Sharing:
    """Return how many ranks share the host and the control group of one."""
    need = needs[rank]
    host = sum(each.host == need.host for each in needs)
    cgroup = sum((each.host, each.cgroup) == (need.host, need.cgroup) for each in needs)
    return Sharing(max(host, need.local) if len(needs) > 1 else 1, cgroup)


def _shortages(needs: Sequence[_RankNeed], with_optimizer: bool) -> Iterator[_Shortage]:
    for rank, need in enumerate(needs):
        needed = need.needed + (need.optimizer if with_optimizer else 0)
        for room in divided([Room(*each) for each in need.left], _sharing(needs, rank)):
            yield needed - room.bytes, rank, needed, *room, need.optimizer


# --- what a rank needs ----------------------------------------------------------------------------


def _needed(specs: Sequence[UnitSpec], dry_run: DryRun, total: int, device: torch.device) -> int:
    """Return the bytes, of `total`, to allocate beyond existing parameters and inner units."""
    there = sum(
        _in_memory(unit) + (0 if unit.offloads[1] else unit.bytes["grad"]) for unit in dry_run.inner
    )
    freed = 0
    within = peak = 0  # while units are made one after the other
    for spec, unit in zip(specs, dry_run.units, strict=True):
        storages = {ref.param.untyped_storage()._cdata: ref.param for ref in spec.params}
        here = [p for p in storages.values() if p.device == device]
        full = sum(p.untyped_storage().nbytes() for p in here)
        moved = sum(p.numel() * p.itemsize for p in storages.values() if p.device != device)
        peak = max(peak, within + moved + _in_memory(unit))
        within += _in_memory(unit) - full
        freed += full
    return max(total - there - freed, peak, 0)


def _in_memory(unit: _core.Unit) -> int:
    """Return the bytes of a unit's shard in memory: 0 if it is on disk."""
    return 0 if unit.offloads[0] else unit.bytes["shard"]


# --- what a rank has left -------------------------------------------------------------------------


def room_of_gpu(device: torch.device) -> int:
    """Return the bytes that torch can still allocate: free and cached ones."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


# --- the message ----------------------------------------------------------------------------------


def _explain(run: DryRun, world: World, shortage: _Shortage, with_optimizer: bool) -> str:
    """Return the message. with_optimizer: the shortage includes Adam's state."""
    _, rank, needed, limit, source, optimizer = shortage
    what = "the model and Adam's state" if with_optimizer else "the model"
    parts = run.engine.predict(False)
    net = " beyond what its parameters already occupy" if needed < parts.pop("total") else ""
    by_part = ", ".join(f"{part} {_mib(size)}" for part, size in parts.items() if size)
    largest = max(run.units, key=lambda unit: unit.bytes["full"])
    return (
        f"this {type(run.module).__name__} does not fit in memory: rank {rank} of {world.size} "
        f"needs {_mib(needed)} MiB for {what}{net}, but only {_mib(limit)} MiB are available "
        f"({source}).\nBy part, in MiB: {by_part}; Adam's state adds {_mib(optimizer)}; unit "
        f"'{largest.name or '(root)'}', the largest, takes {_mib(largest.bytes['full'])} unsharded."
        "\nUse smaller units (auto_wrap_policy), more ranks, full_shard, model.bfloat16(), or "
        "offload=zshard.Offload(directory=..., grads=True), as zshard.predict_memory() compares "
        "them; or pass memory_limit=None to wrap the model anyway"
    )


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f}"
