"""Check at wrap time, before anything changes, whether a model fits in memory.

Layouts determine how much zshard will allocate, so a model that cannot fit is an error on all
ranks, with numbers and remedies, instead of a process that the kernel kills some steps later.
Only certain allocations count. A module's parameters are in memory already and are freed as their
units are made, so that memory is not needed twice.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from zshard import _core
from zshard.memory.dry_run import DryRun, Planned, dry_comms, world_of
from zshard.memory.host_limits import Room, Sharing, room_of_cgroup, room_of_mappings, rooms
from zshard.ranks.agreement import warn_on_rank_0
from zshard.ranks.devices import torch_device
from zshard.ranks.groups import _env_int
from zshard.ranks.meeting import host_id
from zshard.ranks.transports import Comms
from zshard.strategy import ShardingStrategy
from zshard.units.units import Options, State

_MIB = 1 << 20
_MESSAGE = 256  # bytes, for six numbers and a source


class _Shortage(NamedTuple):
    """What a rank lacks under its tightest limit.

    missing: bytes short, that is, `needed` - `limit`; negative if there are enough. source: which
    limit, for the message. optimizer: bytes of Adam's state on that rank. world: how many
    ranks there are.
    """

    missing: int
    rank: int
    needed: int
    limit: int
    source: str
    optimizer: int
    world: int

    def with_optimizer(self) -> _Shortage:
        """Return the same, where `needed` includes Adam's state."""
        missing, needed = self.missing + self.optimizer, self.needed + self.optimizer
        return self._replace(missing=missing, needed=needed)


def check_fits(
    module: nn.Module,
    planned: Sequence[Planned],
    comms: Comms,
    inner: Sequence[tuple[nn.Module, State]],
    limit: int | str,
    device: str,
) -> Sharing:
    """Raise MemoryError on all ranks if `module` does not fit in the memory of one of them; warn on
    rank 0 if it will not fit with the optimizer's state. Collective: two exchanges.

    inner: units of earlier calls that become part of the model. limit: bytes that a rank may use;
        "auto": what the hosts and control groups leave, or on a GPU its free memory.

    Returns how many ranks share what this rank's host and control group leave.
    """
    world, strategy = world_of(comms), planned[-1][1].strategy
    dry = dry_comms(world, strategy, comms.all.rank)
    dry_run = DryRun(module, planned, dry, inner)
    offload = planned[-1][1].offload
    # Steps in backward do not hold gradients, and such models train like that.
    parts = dry_run.predict(stepped=offload is not None)
    needed = parts["total"]
    if not isinstance(limit, int):
        needed = _needed(planned, dry_run, needed - parts["transport"], torch_device(device))
    sharing = _sharing(comms.all)
    rank, adam = comms.all.rank, 2 * dry_run.trained_bytes()
    found = [
        _Shortage(needed - room.bytes, rank, needed, *room, adam, comms.all.world)
        for room in _rooms(limit, device, sharing)
    ]
    mine = max(found, default=_Shortage(-sys.maxsize, rank, 0, 0, "no limit", 0, comms.all.world))
    left = room_of_mappings()
    mappings = dry_run.engine.predict_mappings(), sys.maxsize if left is None else left
    told = json.dumps([*mine, *mappings]).encode().ljust(_MESSAGE)
    ranks = [json.loads(each) for each in comms.all.exchange(told)]
    _check_mappings(module, [(needed, left) for *_, needed, left in ranks])
    shortages = [_Shortage(*row) for *row, _, _ in ranks]
    short = max(shortages)
    if short.missing > 0:
        raise MemoryError(_explain(module, planned[-1][1], dry_run, short, False))
    short = max(each.with_optimizer() for each in shortages)
    if short.missing > 0:
        words = _explain(module, planned[-1][1], dry_run, short, True)
        warn_on_rank_0(comms.all, words, RuntimeWarning)
    return sharing


# --- what a rank needs ----------------------------------------------------------------------------


def _needed(planned: Sequence[Planned], dry_run: DryRun, total: int, device: torch.device) -> int:
    """Return the bytes, of `total`, to allocate beyond existing parameters and inner units."""
    there = sum(
        _in_memory(unit) + (0 if unit.offloads[1] else unit.bytes["grad"]) for unit in dry_run.inner
    )
    given_back = 0
    within = peak = 0  # while units are made one after the other
    for (spec, _), unit in zip(planned, dry_run.units, strict=True):
        storages = {ref.param.untyped_storage()._cdata: ref.param for ref in spec.params}
        here = [p for p in storages.values() if p.device == device]
        whole = sum(p.untyped_storage().nbytes() for p in here)
        made = sum(p.numel() * p.itemsize for p in storages.values() if p.device != device)
        peak = max(peak, within + made + _in_memory(unit))
        within += _in_memory(unit) - whole
        given_back += whole
    return max(total - there - given_back, peak, 0)


def _in_memory(unit: _core.Unit) -> int:
    """Return the bytes of a unit's shard in memory: 0 if it is on disk."""
    return 0 if unit.offloads[0] else unit.bytes["shard"]


# --- what a rank has left -------------------------------------------------------------------------


def _rooms(limit: int | str, device: str, sharing: Sharing) -> list[Room]:
    if isinstance(limit, int):
        return [Room(limit, "memory_limit")]
    if torch_device(device).type == "cuda":
        return [Room(room_of_gpu(torch_device(device)), "free GPU memory")]
    return rooms(sharing)


def room_of_gpu(device: torch.device) -> int:
    """Return the bytes that torch can still allocate: free and cached ones."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _sharing(comm: _core.Comm) -> Sharing:
    """Return how many ranks share this rank's host and control group. Collective."""
    own = [host_id(), f"{host_id()}/{room_of_cgroup()[1]}"]
    mine = [hashlib.sha256(text.encode()).digest() for text in own]
    everyone = comm.exchange(b"".join(mine))
    host, cgroup = (sum(digest in each for each in everyone) for digest in mine)
    local = _env_int("LOCAL_WORLD_SIZE") or 1
    return Sharing(max(host, local) if comm.world > 1 else 1, cgroup)


def _check_mappings(module: nn.Module, ranks: Sequence[tuple[int, int]]) -> None:
    """Raise MemoryError if a rank may not create as many memory mappings as it will need.

    ranks: of each rank, the mappings that it needs and those that it has left.
    """
    missing, rank = max((needed - left, rank) for rank, (needed, left) in enumerate(ranks))
    if missing > 0:
        needed, left = ranks[rank]
        raise MemoryError(
            f"this {type(module).__name__} needs too many memory mappings: rank {rank} of "
            f"{len(ranks)} needs {needed} for its units and the buckets of all ranks, but "
            f"the kernel allows only {left} more: raise vm.max_map_count, or use fewer "
            'units (auto_wrap_policy) or transport="c10d"'
        )


# --- the message ----------------------------------------------------------------------------------


def _explain(
    module: nn.Module, usual: Options, dry_run: DryRun, short: _Shortage, has_optimizer: bool
) -> str:
    """Return the message: what is needed, and which settings need less. usual: the root's options.
    has_optimizer: the shortage includes Adam's state."""
    what = "the model and Adam's state" if has_optimizer else "the model"
    parts = dry_run.predict()
    by_part = ", ".join(
        f"{part} {_mib(size)}" for part, size in parts.items() if size and part != "total"
    )
    net = " beyond what its parameters already occupy" if short.needed < parts["total"] else ""
    largest = max(dry_run.units, key=lambda unit: unit.bytes["full"])
    ways = [
        "more ranks" if usual.strategy is ShardingStrategy.FULL_SHARD else 'strategy="full_shard"',
        *(["offload=zshard.Offload(directory=..., grads=True)"] if usual.offload is None else []),
        *(["keep_gathered=False"] if usual.keep else []),
        "mixed_precision=MixedPrecision(torch.bfloat16)",
        "model.bfloat16() with AdamW(..., stochastic_rounding=True)",
        "model.optimizer_in_backward(...) with memory_limit=None",
        f"smaller units (auto_wrap_policy): the largest, '{largest.name or '(root)'}', takes "
        f"{_mib(largest.bytes['full'])} MiB unsharded, in each slot and again in each bucket "
        f"({_mib(largest.bytes['bucket'])} MiB)",
    ]
    return (
        f"this {type(module).__name__} does not fit in memory: rank {short.rank} of "
        f"{short.world} needs {_mib(short.needed)} MiB for {what}{net}, but only "
        f"{_mib(short.limit)} MiB are available ({short.source}).\n"
        f"By part, in MiB: {by_part}; Adam's state adds {_mib(short.optimizer)}.\n"
        f"These need less, and zshard.predict_memory() says how much: {'; '.join(ways)}.\n"
        "Pass memory_limit=None to wrap the model anyway."
    )


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f}"
