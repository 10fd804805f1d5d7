"""Check at wrap time, before anything changes, whether a model fits in memory.

Layouts determine how much zshard will allocate, so a model that cannot fit is an error on all
ranks, with numbers and alternatives, instead of a process that the kernel kills some steps later.
Only certain allocations count. A module's parameters are in memory already and are freed as their
units are made, so that memory is not needed twice.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from zshard import _core
from zshard.memory.dry_run import DryRun, World, dry_comms, world_of
from zshard.memory.host_limits import Room, Sharing, divided, left_on_host, room_of_mappings
from zshard.offload import Offload
from zshard.precision import MixedPrecision, precision_of
from zshard.ranks.agreement import warn_on_rank_0
from zshard.ranks.devices import torch_device
from zshard.ranks.groups import _env_int
from zshard.ranks.meeting import host_id
from zshard.ranks.transports import Comms
from zshard.strategy import ShardingStrategy
from zshard.units.units import State
from zshard.wrap.tree import UnitSpec

_MIB = 1 << 20
_MESSAGE = 512  # bytes, for a _RankNeed


class _RankNeed(NamedTuple):
    """What a rank needs and has left, in bytes. optimizer: of Adam's state. mappings: the memory
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
    """Return the message: what is needed, and which settings need less. The estimates are those of
    the check. with_optimizer: the shortage includes Adam's state."""
    missing, rank, needed, limit, source, optimizer = shortage
    what = "the model and Adam's state" if with_optimizer else "the model"
    parts = run.engine.predict(False)
    total = parts.pop("total")
    by_part = ", ".join(f"{part} {_mib(size)}" for part, size in parts.items() if size)
    net = " beyond what its parameters already occupy" if needed < total else ""
    lines = [
        f"this {type(run.module).__name__} does not fit in memory: rank {rank} of {world.size} "
        f"needs {_mib(needed)} MiB for {what}{net}, but only {_mib(limit)} MiB are available "
        f"({source}).",
        f"By part, in MiB: {by_part}; Adam's state adds {_mib(optimizer)}.",
    ]
    room = total - missing + (optimizer if with_optimizer else 0)
    ways = [] if run.inner else _ways_out(run, world, total, room)
    if ways:
        lines += [f"Alternatives to these {_mib(total)} MiB:", *ways]
    largest = max(run.units, key=lambda unit: unit.bytes["full"])
    lines += [
        f"  smaller units (auto_wrap_policy): the largest, '{largest.name or '(root)'}', takes "
        f"{_mib(largest.bytes['full'])} MiB unsharded",
        "Pass memory_limit=None to wrap the model anyway.",
    ]
    return "\n".join(lines)


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f}"


def _ways_out(run: DryRun, world: World, total: int, room: int) -> list[str]:
    """Return a line for each alternative that takes less memory than `total`, with its size and
    that of Adam's state there. room: bytes for both."""
    usual, lines = run.specs[-1].options, []
    full, more, bf16 = ShardingStrategy.FULL_SHARD, 2 * world.size, torch.bfloat16
    has_peers = world.size > 1
    ways: dict[str, dict[str, Any]] = {}
    if usual.offload is None:
        to_disk = {"offload": Offload(directory=".", grads=True)}
        ways["offload=zshard.Offload(directory=..., grads=True), Adam's state too"] = to_disk
    if usual.keep:
        ways["keep_gathered=False"] = {"keep": 0}
    if has_peers and usual.strategy is not full:
        ways['strategy="full_shard"'] = {"strategy": full}
    if has_peers:
        ways["memory_limit=None and model.optimizer_in_backward(...)"] = {"stepped": True}
    ways[f"full_shard on {more} ranks, each with as much memory"] = {
        "ranks": more,
        "strategy": full,
    }
    if usual.precision.compute is None:
        casts = precision_of(MixedPrecision(bf16))
        ways["mixed_precision=MixedPrecision(torch.bfloat16)"] = {"precision": casts}
        ways["model.bfloat16() and AdamW(..., stochastic_rounding=True)"] = {"dtype": bf16}
    for words, changed in ways.items():
        ranks, stepped = changed.pop("ranks", 0), changed.pop("stepped", False)
        dtype = changed.pop("dtype", None)
        specs = [replace(spec, options=spec.options._replace(**changed)) for spec in run.specs]
        there = world._replace(size=ranks, shard_group=ranks) if ranks else world
        comms = dry_comms(there, specs[-1].options.strategy)
        other = DryRun(run.module, specs, comms, dtype=dtype)
        size, adam = other.engine.predict(stepped)["total"], 2 * other.trained_bytes()
        fits = f" (fits, but not with Adam's state, {_mib(adam)} MiB more)" if size <= room else ""
        if size + adam <= room:
            fits = " (fits, with Adam's state)"
        if size < total:
            lines.append(f"  {words}: {_mib(size)} MiB{fits}")
    return lines
