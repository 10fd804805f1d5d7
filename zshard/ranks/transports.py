"""Transports between the ranks of a group.

Each process has one transport per process group and timeout. All members create it together on
first use, and it stays.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import NamedTuple

import torch
import torch.distributed as dist

from zshard import _core
from zshard._errors import check_choice
from zshard._logger import log
from zshard.ranks import ends, meeting
from zshard.ranks.agreement import gather_objects, on_all_ranks, warn_together
from zshard.ranks.devices import CPU, is_stand_in, torch_device
from zshard.ranks.groups import Group, Groups, new_subgroup
from zshard.ranks.meeting import connect_hosts, connect_shm, ranks_per_host
from zshard.ranks.nccl import NcclOptions, library, sharing_a_gpu
from zshard.ranks.stalls import answer_stalls, forget_dead
from zshard.strategy import ShardingStrategy

TRANSPORTS = {"cpu": ("auto", "shm", "hosts", "c10d"), "cuda": ("auto", "nccl", "c10d")}

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

_WHY = {  # "auto" takes a transport, for the log
    "shm": "they are on one host",
    "hosts": "their hosts have the same number of ranks each",
    "c10d": "the faster ones were refused",
    "nccl": "each has a GPU of its own",
}


@dataclass(eq=False)
class _Connection:
    group: Group
    device: str
    names: set[Asked]  # the requests that it answers
    comm: _core.Comm
    limit: float  # its timeout in seconds
    created: set[Group]  # zshard's own groups, which end with it
    beside: dict[str, Group] = field(default_factory=dict)  # of these, group_beside()'s
    is_replaced: bool = False  # by a new one, as an error has stopped it; its models are unusable


_KEEPER = "ZSHARD_KEEPER"  # set for the ranks of a kept run (extras/keeping)
# What zshard itself asks for, and no caller can name: shm, or c10d alone; a second transport, for
# another thread.
_Own = Enum("_Own", ["FLAT", "BESIDE"])

_OUTLIVE = 5.0  # seconds that a rank whose wait failed leaves for the rank that caused it
_PATIENCE = 1800.0  # seconds: the least timeout of a wait for a rank that may be waiting for a disk

Asked = str | NcclOptions | _Own  # a transport, by name or by NCCL's options
CommSettings = tuple[Asked | None, float | None, str]  # comm_for's transport, timeout and device

_connections: list[_Connection] = []  # on all ranks in the same order


class Comms(NamedTuple):
    """The transports of a model, in the order of Engine's arguments."""

    all: _core.Comm  # all ranks, which reduce gradients
    shards: _core.Comm  # those ranks that one replica of the model is sharded over
    shard_group: _core.Comm  # ranks that gather from each other
    replica_group: _core.Comm | None  # ranks with the same secondary shard


def comms_for(
    groups: Groups, strategy: ShardingStrategy, comm: _core.Comm, settings: CommSettings
) -> Comms:
    """Return the transports of a model's groups; `comm` is that of all ranks. Collective on first
    use.

    settings: comm_for's transport, timeout and device. Over shm there are no secondary shards: see
        ShardingStrategy.
    """
    if strategy.has_secondary:
        if comm.transport == "shm" or groups.shard_group is groups.world:
            return Comms(comm, comm, comm, None)
        replica_group = comm
        if groups.replica_group is not groups.world:
            replica_by = "c10d" if settings[2] == CPU else settings[0]
            replica_group = comm_for(groups.replica_group, replica_by, *settings[1:])
        return Comms(comm, comm, _within(groups, comm, settings), replica_group)
    shard_group = comm if groups.shard_group is groups.world else _within(groups, comm, settings)
    return Comms(comm, shard_group, shard_group, None)


def group_of(comm: _core.Comm) -> Group | None:
    """Return the process group of a transport. None, torch's word for the default group, also means
    a single rank."""
    return next((each.group for each in _connections if each.comm is comm), None)


def ranks_of(comm: _core.Comm) -> list[int]:
    """Return the ranks of a transport, in the default group; [] for a single rank."""
    group = group_of(comm)
    return [] if group is None else dist.get_process_group_ranks(group)


def _within(groups: Groups, comm: _core.Comm, settings: CommSettings) -> _core.Comm:
    """Return the transport of a shard group. All shard groups use the same kind: shards are laid
    out for it, and all ranks reduce together."""
    if groups.shard_group is None or groups.world is None or settings[2] != CPU:
        return comm_for(groups.shard_group, *settings)
    with on_all_ranks(comm):
        shards = comm_for(groups.shard_group, *settings)
    kinds = [each.rstrip().decode() for each in comm.exchange(shards.transport.encode().ljust(16))]
    if len(set(kinds)) == 1:
        return shards
    why = f"that of rank {kinds.index('c10d')} has no shm: see its own warning"
    _warn_of_c10d(groups.world, "shard groups", why)
    return comm_for(groups.shard_group, "c10d", *settings[1:])


def _warn_of_c10d(group: Group, ranks: str, why: str) -> None:
    text = f"{ranks} use transport='c10d', which is slower: {why}. To silence this, pass it"
    warn_together(group, text)


def check_settings(
    transport: Asked | None, timeout: float | None, device: str = CPU
) -> tuple[Asked, float | None]:
    """Return the transport and the timeout in seconds that the arguments or the environment set.

    Raises ValueError for invalid ones. Call it before ranks connect, so that no rank sees a
    connection break.
    """
    wanted = transport or os.environ.get("ZSHARD_TRANSPORT") or "auto"
    kind = CPU if is_stand_in(device) else device.partition(":")[0]
    if not (wanted is _Own.FLAT or (isinstance(wanted, NcclOptions) and device != CPU)):
        check_choice(f"transport of a model on {kind}", wanted, TRANSPORTS[kind])
    name, value = "timeout", timeout
    if value is None and os.environ.get("ZSHARD_TIMEOUT"):
        name, value = "ZSHARD_TIMEOUT", os.environ["ZSHARD_TIMEOUT"]  # type: ignore[assignment]
    if value is None:
        return wanted, None
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not seconds > 0:
        raise ValueError(f"{name} must be a positive number of seconds, got {value!r}")
    return wanted, seconds


def comm_for(
    group: Group | None, transport: Asked | None, timeout: float | None, device: str = CPU
) -> _core.Comm:
    """Return the transport of `group`, created on first use, which is collective over the group.

    transport: "auto", "shm", "hosts" or "c10d"; on GPUs "auto", "nccl", "c10d" or NcclOptions.
        None: ZSHARD_TRANSPORT, or "auto".
    timeout: seconds that one wait may last. None: ZSHARD_TIMEOUT, or the group's own timeout.

    Raises ValueError for an unknown name, RuntimeError if the requested transport is not available.
    """
    wanted, seconds = check_settings(transport, timeout, device)
    if os.environ.get(_KEEPER):
        _core.keep_memory()
    if group is None:
        return _comm_alone(device)
    _drop_dead_entries()
    limit = _timeout_of(group) if seconds is None else seconds
    known = _known(group, wanted, device)
    entry = _agreed(known[0].comm, known, limit) if known else None
    if entry is None:
        connect = _connect if device == CPU else functools.partial(connect_gpu, device)
        automatic = _known(group, "auto", device)
        entry = _connection(group, device, wanted, limit, lambda: connect(group, wanted, limit))
        entry.names.add(entry.comm.transport)  # "auto": the explicit name means the same now
        if all(each.comm.transport == wanted for each in automatic):
            entry.names.add("auto")
        comm, kind = entry.comm, entry.comm.transport.removesuffix("_gpu")
        log.common(
            comm.rank,
            "transport %s between %d ranks: %s; timeout %g s, from %s",
            *(comm.transport, comm.world),
            *("asked for" if wanted == kind else _WHY[kind], limit),
            "the process group" if seconds is None else "timeout= or ZSHARD_TIMEOUT",
        )
    return entry.comm


def _known(group: Group, wanted: Asked, device: str) -> list[_Connection]:
    """Return the group's transports of that name, one for each timeout. Those that an error has
    stopped, if the script caught it, are replaced: new models connect over new ones. All ranks do:
    a stopped transport has reported its error to every rank."""
    for each in _connections:
        each.is_replaced |= _core.is_stopped(each.comm)
    same = [each for each in _connections if (each.group, each.device) == (group, device)]
    return [each for each in same if wanted in each.names and not each.is_replaced]


def _agreed(comm: _core.Comm, entries: list[_Connection], limit: float) -> _Connection | None:
    """Return the one with this timeout, if all ranks have it: timeouts may differ between ranks.
    Collective."""
    at = next((i for i, each in enumerate(entries) if each.limit == limit), len(entries))
    places = comm.exchange(at.to_bytes(4, "little"))
    return entries[at] if len(set(places)) == 1 and at < len(entries) else None


def comm_beside(comm: _core.Comm) -> _core.Comm:
    """Return a second transport between the same ranks' hosts, for use on another thread.
    Collective on first use. Its timeout is at least half an hour: a peer may wait for a slow
    disk."""
    if comm.world == 1:
        return _comm_alone(CPU)
    _drop_dead_entries()
    group = _connection_of(comm).group
    patience = max(comm.timeout, _PATIENCE)
    entry = _agreed(comm, _known(group, _Own.BESIDE, CPU), patience)
    if entry is None:
        # The model's kind of transport, where possible.
        kind = "c10d" if comm.transport in ("c10d", "hosts") else "auto"
        try:
            connect = functools.partial(_connect, group, kind, patience, True)
            entry = _connection(group, CPU, _Own.BESIDE, patience, connect)
        except _core.PeerError:
            comm.exchange(b"")  # raises the error that names the rank
            raise
    return entry.comm


def group_beside(comm: _core.Comm, device: torch.device) -> Group:
    """Return a process group of a transport's ranks for tensors on `device`, which no other code
    uses. Collective on first use."""
    entry = _connection_of(comm)
    if device.type not in entry.beside:
        entry.beside[device.type] = new_group(entry.group, str(device))
        entry.created.add(entry.beside[device.type])
    return entry.beside[device.type]


@functools.cache
def _comm_alone(device: str) -> _core.Comm:
    return _core.Comm.alone(device)


def _connection_of(comm: _core.Comm) -> _Connection:
    entry = next((each for each in _connections if each.comm is comm), None)
    if entry is None:
        raise RuntimeError(
            "the model's process group has been destroyed: destroy it after the model's last use"
        )
    return entry


def _connection(
    group: Group, device: str, name: Asked, limit: float, connect: Callable[[], _core.Comm]
) -> _Connection:
    """Register the result of `connect`, with the process groups that it creates."""
    before = set(dist.distributed_c10d._world.pg_map)
    comm = connect()
    others = set().union(*(entry.created for entry in _connections))
    created = set(dist.distributed_c10d._world.pg_map) - before - others
    _connections.append(_Connection(group, device, {name}, comm, limit, created))
    return _connections[-1]


def _drop_dead_entries() -> None:
    """Forget the transports of groups that the script has destroyed, and destroy zshard's own
    groups for them: each of gloo's has three threads, which wake a hundred times a second."""
    groups = dist.distributed_c10d._world.pg_map
    dead = [entry for entry in _connections if entry.group not in groups]
    _connections[:] = [entry for entry in _connections if entry.group in groups]
    forget_dead()
    for group in set().union(*(entry.created for entry in dead if not entry.is_replaced)):
        if group in groups:
            dist.destroy_process_group(group)


def _timeout_of(group: Group) -> float:
    """Return the group's own timeout in seconds."""
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # a group for GPUs only
        backend = group._get_backend(torch.device("cuda"))
    limit = getattr(getattr(backend, "options", None), "_timeout", None)
    return limit.total_seconds() if isinstance(limit, timedelta) else 1800.0


def _connect(group: Group, wanted: Asked, timeout: float, beside: bool = False) -> _core.Comm:
    ends.watch(_notify_peers, _leave)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if wanted in ("c10d", "hosts"):
        hosts = gather_objects(meeting.host_id(), group)
    else:
        met = connect_shm(group, timeout)
        if isinstance(met, _core.Comm):
            if not beside:  # the other one's waits are on another thread
                answer_stalls(met, group)
            return met
        log.common(rank, "transport shm refused: %s", met.reason)
        if wanted == "shm":
            raise RuntimeError(f"transport='shm' is not available: {met.reason}. Or pass 'c10d'")
        if met.shortage:
            raise RuntimeError(
                f"no transport is available: shm: {met.reason}; c10d: {met.shortage}"
            )
        hosts = met.hosts
        if len(set(hosts)) == 1:
            _warn_of_c10d(group, "ranks of one host", f"shm is not available: {met.reason}")
    inner = new_group(group, CPU)
    if not beside and (wanted == "hosts" or (wanted == "auto" and len(set(hosts)) > 1)):
        comm = connect_hosts(group, inner, hosts, timeout)
        if isinstance(comm, _core.Comm):
            answer_stalls(comm, group, inner)
            return comm
        log.common(rank, "transport hosts refused: %s", comm)
        if wanted == "hosts":
            raise RuntimeError(f"transport='hosts' is not available: {comm}. Pass 'auto' or 'c10d'")
        _warn_of_c10d(group, "hosts", f"transport='hosts' is not available: {comm}")
    comm = _core.Comm.c10d(inner.group_name, rank, world, timeout, ranks_per_host(hosts))
    if not beside:
        answer_stalls(comm, group, inner)
    return comm


def new_group(group: Group, device: str, backend: str | None = None) -> Group:
    """Return a new process group for tensors on that device, so that zshard's collectives never
    mix with the script's. backend: None for that of `group`, or torch's usual one."""
    ranks = dist.get_process_group_ranks(group)
    kind = torch_device(device).type
    if backend is None and kind not in str(dist.get_backend_config(group)):
        backend = BACKENDS[kind]
    if len(ranks) < dist.get_world_size():
        return new_subgroup(ranks, backend)
    new: Group = dist.new_group(ranks, backend=backend)
    return new


def choices_for(device: str, wanted: Asked) -> tuple[Asked, Asked]:
    """Return the transport between the hosts of GPUs, and the backend for these GPUs' memory."""
    return _Own.FLAT, wanted


def connect_gpu(device: str, group: Group, wanted: Asked, timeout: float) -> _core.Comm:
    """Return the transport between GPUs: one between their hosts, and a backend for GPU memory."""
    options = wanted if isinstance(wanted, NcclOptions) else None
    hosts, kind = choices_for(device, wanted)
    control = comm_for(group, hosts, timeout)
    kind = "nccl" if options is not None else kind
    if kind == "auto" and (sharing := sharing_a_gpu(control, device)) is not None:
        why = f"ranks {sharing[0]} and {sharing[1]} share a GPU, which NCCL does not support"
        log.common(control.rank, "transport nccl refused: %s", why)
        _warn_of_c10d(group, "all ranks", why)
        inner = new_group(group, device, "gloo")  # torch's NCCL refuses the same GPUs as zshard's
        return _core.Comm.gpu(control, "c10d", device, inner.group_name)
    if kind in ("auto", "nccl"):
        with contextlib.suppress(NotImplementedError):  # ranks agree on it below
            library()
        try:
            numbers = (options or NcclOptions())._numbers()
            return _core.Comm.gpu(control, "nccl", device, "", numbers)
        except NotImplementedError as error:  # on all ranks: one of them lacks NCCL
            log.common(control.rank, "transport nccl refused: %s", error)
            if kind != "auto":
                raise
    return _core.Comm.gpu(control, "c10d", device, new_group(group, device).group_name)


def _comms(beside: bool) -> list[_core.Comm]:
    """Return the transports that other threads use, or all others, without those replaced."""
    chosen = [each for each in _connections if (_Own.BESIDE in each.names) is beside]
    return [each.comm for each in chosen if not each.is_replaced]


def _notify_peers(text: str) -> None:
    """Notify peers that an exception ends this rank."""
    for comm in _comms(beside=False):  # a thread may still be writing, and the process waits for it
        comm.abort(text)
        comm.close()


def _leave() -> None:
    """Exit normally: notify the peers that this rank left, so that they do not report it dead."""
    comms = _comms(beside=False)
    if any(comm.lost for comm in comms):
        ends.note_failure()
    is_orderly = ends.is_reported() and not ends.has_failed()
    for comm in comms if is_orderly else ():
        try:
            comm.end()  # compares the ranks' calls after the last round
        except _core.DivergenceError as error:
            ends.fail(f"zshard: DivergenceError at the end of rank {comm.rank}: {error}")
    for comm in comms:
        _core.outlive(comm, _OUTLIVE)  # launchers report the first process that exits
    for comm in _comms(beside=True):
        if ends.exit_text():
            comm.abort(ends.exit_text())
        comm.close()
    for each in _connections:
        each.comm.close()  # from here on, no rank waits for this one
    _connections.clear()
