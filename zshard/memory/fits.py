"""Check at wrap time, before anything changes, whether a model fits in memory.

Layouts determine how much zshard will allocate, so a model that cannot fit is an error on all
ranks, with numbers and alternatives, instead of a process that the kernel kills some steps later.
Only certain allocations count. A module's parameters are in memory already and are freed as their
units are made, so that memory is not needed twice.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from zshard import _core
from zshard._errors import warn
from zshard.memory.advice import Model, Shortage, explain
from zshard.memory.dry_run import DryRun, Planned, dry_comms, world_of
from zshard.memory.host_limits import (
    room_of_cgroup,
    room_of_host,
    room_of_mappings,
    room_of_process,
    shared_by,
)
from zshard.ranks.devices import torch_device
from zshard.ranks.groups import _env_int
from zshard.ranks.meeting import host_id
from zshard.ranks.transports import Comms
from zshard.units.units import State

MemoryLimit = int | str | None
_MIB = 1 << 20
_CHUNK = 64 * _MIB  # gradients are mapped in chunks, csrc/device/arena.c
_UNITS = {"": 1, "k": 10, "m": 20, "g": 30, "t": 40}
_MESSAGE = struct.Struct("8s8s9q")


class _Need(NamedTuple):
    """Bytes that a rank still has to allocate: in total, private to the process, and of address
    space; the optimizer's later share; and the number of memory mappings that it needs."""

    found: int
    private: int
    addresses: int
    optimizer: int
    mappings: int


class Sharing(NamedTuple):
    """The number of ranks that share the memory of a host and of a control group."""

    host: int = 1
    cgroup: int = 1


class _Rank(NamedTuple):
    """The numbers that a rank sends to the others; -1: no limit."""

    host: bytes
    cgroup: bytes
    on_host: int
    in_cgroup: int
    own: int  # a limit of the process itself
    own_kind: int
    own_need: int
    need: int
    optimizer: int
    mappings: int  # needed
    unmapped: int  # still available


_OWN = ("memory_limit", "RLIMIT_DATA", "RLIMIT_AS", "GPU memory")


def parse_limit(limit: MemoryLimit) -> MemoryLimit:
    """Return memory_limit as bytes, "auto" or None. "12GiB", "12GB": both mean 12 * 2**30 bytes.

    Raises ValueError for a malformed size, TypeError for an argument of another type.
    """
    if limit is None or limit == "auto":
        return limit
    return parse_size("memory_limit", limit, '"auto" or None')


def parse_size(name: str, size: int | str, others: str) -> int:
    """Return an argument in bytes: a number, or a string such as "12GiB".

    name: the argument. others: what else it may be, for the message.

    Raises ValueError for a malformed size, TypeError for an argument of another type.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(
            f'{name} must be a number of bytes, a string such as "12GiB", {others}, got {size!r}'
        )
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", size.lower())
        if found is None:
            raise ValueError(f'{name} must be a size such as "12GiB", {others}, got {size!r}')
        size = int(float(found[1]) * (1 << _UNITS[found[2]] if found[2] else 1))
    if size <= 0:
        raise ValueError(f"{name} must be positive, got {size!r}")
    return size


def check_fits(
    module: nn.Module,
    planned: Sequence[Planned],
    comms: Comms,
    inner: Sequence[tuple[nn.Module, State]],
    limit: int | str,
    device: str,
) -> Sharing:
    """Raise MemoryError on all ranks if `module` does not fit in the memory of one of them; warn on
    rank 0 if it will not fit with the optimizer's state. Collective: one exchange.

    inner: units of earlier calls that become part of the model. limit: bytes that a rank may use;
        "auto": what the hosts and the limits of the processes leave, or on a GPU its free memory.

    Returns how many ranks share what this rank's host and control group leave.
    """
    world, strategy = world_of(comms), planned[-1][1].strategy
    dry = dry_comms(world, strategy, comms.all.rank)
    dry_run = DryRun(module, planned, dry, inner)
    offload = planned[-1][1].offload
    # Steps in backward do not hold gradients, and such models train like that.
    parts = dry_run.predict(stepped=offload is not None)
    need = _need_of(planned, dry_run, parts, comms, torch_device(device))
    if isinstance(limit, int):
        need = need._replace(found=parts["total"])
    mine = _MESSAGE.pack(*_rank_limits(limit, need, device))
    ranks = [_Rank(*_MESSAGE.unpack(each)) for each in comms.all.exchange(mine)]
    _check_mappings(module, ranks)
    model = Model(module, planned, world, dry_run, bool(inner))
    short = _worst(ranks, with_optimizer=False)
    if short is not None:
        raise MemoryError(explain(model, short, "the model"))
    short = _worst(ranks, with_optimizer=True)
    if short is not None and comms.all.rank == 0:
        text = explain(model, short, "the model and Adam's state")
        warn(text, RuntimeWarning)
    return _sharing(ranks, ranks[comms.all.rank])


# --- what a rank needs ----------------------------------------------------------------------------


def _need_of(
    planned: Sequence[Planned],
    dry_run: DryRun,
    parts: dict[str, int],
    comms: Comms,
    device: torch.device,
) -> _Need:
    """Return the bytes to allocate beyond existing parameters and inner units."""
    there = sum(_held_by(unit) for unit in dry_run.inner)
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
    needed = max(parts["total"] - parts["transport"] - there - given_back, peak, 0)
    mapped = comms.shard_group.transport == "shm"
    shared = 0
    if mapped:
        cut = [unit for unit in dry_run.units if not unit.replicated]
        shared = sum(_in_memory(unit) for unit in cut)
    in_buckets = parts["buckets"] if comms.all.transport == "shm" else 0
    rounding = -parts["grads"] % _CHUNK
    private = max(needed + rounding - shared - in_buckets, 0)
    addresses = needed + rounding + shared * (comms.shard_group.world - 1)
    addresses += in_buckets * (comms.all.world - 1)  # this rank maps those of all ranks
    addresses += parts["offloaded"] * (comms.shard_group.world if mapped else 1)
    mappings = dry_run.engine.predict_mappings()
    return _Need(needed, private, addresses, 2 * dry_run.trained_bytes(), mappings)


def _in_memory(unit: _core.Unit) -> int:
    """Return the bytes of a unit's shard in memory: 0 if it is on disk."""
    return 0 if unit.offloads[0] else unit.bytes["shard"]


def _held_by(unit: _core.Unit) -> int:
    return _in_memory(unit) + (0 if unit.offloads[1] else unit.bytes["grad"])


def _rank_limits(limit: MemoryLimit, need: _Need, device: str) -> _Rank:
    left = room_of_mappings()
    maps = need.mappings, -1 if left is None else left
    none = _Rank(b"", b"", -1, -1, -1, 0, 0, need.found, need.optimizer, *maps)
    if isinstance(limit, int):
        return none._replace(own=limit, own_need=need.found)
    if torch_device(device).type == "cuda":
        return none._replace(own=_room_of_gpu(device), own_kind=3, own_need=need.found)
    host, cgroup = room_of_host(), room_of_cgroup()
    own = _own_limit(need)
    return none._replace(
        host=_digest(host_id()),
        cgroup=_digest(f"{host_id()}/{cgroup.key}" if cgroup else ""),
        on_host=-1 if host is None else host.bytes,
        in_cgroup=-1 if cgroup is None else cgroup.bytes,
        own=own[0],
        own_kind=own[1],
        own_need=own[2],
    )


def _room_of_gpu(device: str) -> int:
    """Return the bytes that torch can still allocate: free and cached ones."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _own_limit(need: _Need) -> tuple[int, int, int]:
    """Return (bytes left, index into _OWN, bytes needed) of the process's tightest limit; -1:
    none."""
    found = []
    for kind, needed in ((1, need.private), (2, need.addresses)):
        left = room_of_process(_OWN[kind])
        if left is not None:
            found.append((left - needed, left, kind, needed))
    return min(found)[1:] if found else (-1, 0, 0)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:8]


def _check_mappings(module: nn.Module, ranks: list[_Rank]) -> None:
    """Raise MemoryError if a rank may not create as many memory mappings as it will need."""
    missing, rank = max((each.mappings - each.unmapped, rank) for rank, each in enumerate(ranks))
    short = ranks[rank]
    if missing > 0 and short.unmapped >= 0:
        raise MemoryError(
            f"this {type(module).__name__} needs too many memory mappings: rank {rank} of "
            f"{len(ranks)} needs {short.mappings} for its units and the buckets of all ranks, but "
            f"the kernel allows only {short.unmapped} more: raise vm.max_map_count, or use fewer "
            'units (auto_wrap_policy) or transport="c10d"'
        )


# --- result ---------------------------------------------------------------------------------------


def _worst(ranks: list[_Rank], with_optimizer: bool) -> Shortage | None:
    """Return the rank with the largest shortage, the same on all ranks; None if all have enough."""
    found = []
    for rank, each in enumerate(ranks):
        later = each.optimizer if with_optimizer else 0
        for needed, limit, source in _limits_of(ranks, each):
            missing, whole = needed + later - limit, needed + later
            if missing > 0:
                found.append(
                    Shortage(missing, rank, whole, limit, source, each.optimizer, with_optimizer)
                )
    return max(found, default=None)


def _limits_of(ranks: list[_Rank], each: _Rank) -> Iterator[tuple[int, int, str]]:
    if each.own >= 0:
        name = _OWN[each.own_kind]
        yield (
            each.own_need,
            each.own,
            "memory_limit" if name == "memory_limit" else f"remaining {name}",
        )
    sharing, inside = _sharing(ranks, each)
    if each.on_host >= 0:
        yield each.need, each.on_host // sharing, f"the host's MemAvailable{shared_by(sharing)}"
    if each.in_cgroup >= 0:
        yield (
            each.need,
            each.in_cgroup // inside,
            f"remaining under the cgroup's limit{shared_by(inside)}",
        )


def _sharing(ranks: list[_Rank], each: _Rank) -> Sharing:
    host = sum(other.host == each.host for other in ranks)
    host = max(host, _env_int("LOCAL_WORLD_SIZE") or 1) if len(ranks) > 1 else 1
    return Sharing(host, sum(other.cgroup == each.cgroup for other in ranks))
