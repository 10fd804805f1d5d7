"""zshard.save(per_host=True): each host writes what its ranks hold to its own disk.

Each rank writes one part file, and each host a manifest, the same on all hosts, that says what is
in all part files (parts.py). With replicas, hosts then copy part files from the hosts before them,
over the wire. Only when every host has synced everything do they rename their folders into place,
and only when all have done so do they delete older checkpoints: a host that is lost in between
leaves the checkpoint before this one complete.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from zshard import api
from zshard.api import NAME as MANIFEST
from zshard.api import (
    PART,
    FileRecord,
    PublicCall,
    SavePlan,
    Staging,
    Target,
    Writer,
    gather,
    gather_bytes,
    group_beside,
    on_all_ranks,
    warn_on_rank_0,
    write_text,
)
from zshard.extras.per_host.hosts import Hosts, look
from zshard.extras.per_host.parts import PartRecord
from zshard.extras.per_host.remote import RemoteParts


class PerHost(NamedTuple):
    """How hosts save on their own disks."""

    hosts: Hosts
    replicas: int  # copies of each part file on other hosts
    group: ProcessGroup | None  # for copying


def parse(per_host: object, replicas: int, overwrite: bool) -> int | None:
    """Return the number of copies; None for hosts that share a disk. Raise ValueError for
    invalid arguments of save()."""
    if replicas and not per_host:
        raise ValueError("replicas are copies on other hosts' disks: pass per_host=True as well")
    if per_host and overwrite:
        raise ValueError("overwrite=True is not available with per_host=True: pass step=")
    return replicas if per_host else None


def writer(comm: api.Comm, beside: api.Comm, replicas: int) -> Callable[[SavePlan, api.Comm], None]:
    """Return the function that carries out a plan. Collective. With fewer hosts than copies, warn,
    and make as many as there can be.

    beside: the transport of the thread that will write.
    """
    hosts = Hosts(comm)
    possible = min(replicas, len(hosts.all) - 1)
    if possible < replicas:
        text = f"replicas={replicas}, but there are only {len(hosts.all)} hosts"
        warn_on_rank_0(comm, f"{text}: this checkpoint has {possible} copies")
    group = group_beside(beside, torch.device("cpu")) if possible else None
    return functools.partial(write_parts, per_host=PerHost(hosts, possible, group))


class _WrittenPart(NamedTuple):
    name: str
    part: PartRecord
    record: FileRecord


@PublicCall("save()")
def write_parts(plan: SavePlan, comm: api.Comm, per_host: PerHost) -> None:
    """Execute the plan. Collective; `comm` belongs to this thread."""
    hosts = per_host.hosts
    _refuse_shared_folder(comm, hosts, plan.target, plan.id)
    # An incomplete set of parts is the remains of an interrupted save.
    earlier, _ = look(comm, hosts, plan.target.path)
    is_remains = earlier is not None and not earlier.is_complete
    staging = Staging(plan.target, plan.id, overwrite=True if is_remains else None)
    try:
        with on_all_ranks(comm):
            if hosts.leads:
                staging.open()
        writer = Writer(plan)
        with on_all_ranks(comm), torch.no_grad():
            part = _write_part(plan, staging.path, comm, hosts, writer)
        row = part and (part.name, part.part.entry, part.record.size, part.record.checksums)
        written = [
            _WrittenPart(name, PartRecord.of(entry), FileRecord(size, tuple(checksums)))
            for name, entry, size, checksums in filter(None, gather(comm, row))
        ]
        names = writer.strange_on_any(comm)
        if per_host.group is not None:
            _copy_parts(comm, per_host, staging.path, written)
        with on_all_ranks(comm):
            text = b""
            if comm.rank == 0:
                records = {each.name: each.record for each in written}
                parts = {each.name: each.part.entry for each in written}
                text = plan.manifest(records, not names, parts)
        text = gather_bytes(comm, text)[0]
        with on_all_ranks(comm):
            if hosts.leads:
                write_text(os.path.join(staging.path, MANIFEST), text)
        try:
            with on_all_ranks(comm):
                if hosts.leads:
                    staging.commit()
        except BaseException:  # one host cannot: all take it back
            staging.withdraw()
            raise
        staging.discard()
        plan.clean_up(comm, hosts.leads, names)
    finally:
        staging.discard()
        staging.close()


def _refuse_shared_folder(comm: api.Comm, hosts: Hosts, target: Target, id: str) -> None:
    """Raise ValueError if several hosts see one folder. Collective."""
    marks = {host: f"{target.hidden(id)}.{i}" for i, host in enumerate(hosts.all)}
    mark = marks.pop(hosts.of[comm.rank])
    is_created = False
    try:
        with on_all_ranks(comm):
            if hosts.leads:
                target.make_parent()
                os.mkdir(mark)
                is_created = True
        with on_all_ranks(comm):
            other = next((host for host, m in marks.items() if os.path.lexists(m)), None)
            if hosts.leads and other is not None:
                names = hosts.names[comm.rank], hosts.names[hosts.of.index(other)]
                raise ValueError(
                    f"per_host=True, but the hosts '{names[0]}' and '{names[1]}' share the folder "
                    f"'{target.parent}': omit per_host"
                )
    finally:
        if is_created:
            os.rmdir(mark)


# --- the part file of a rank ----------------------------------------------------------------------


def _write_part(
    plan: SavePlan, folder: str, comm: api.Comm, hosts: Hosts, writer: Writer
) -> _WrittenPart | None:
    """Write this rank's part file and sync it. None if this rank has nothing to write."""
    # Each host has all headers, and so knows which tensors are missing.
    runs = plan.runs(headers=hosts.leads, texts=comm.rank == 0)
    ranges = {file: [(offset, n) for offset, n, _ in of_file] for file, of_file in runs.items()}
    part = PartRecord(hosts.names[comm.rank], comm.rank, ranges)
    name = f"rank-{comm.rank:05}-of-{comm.world:05}{PART}"
    if part.size == 0:
        return None
    path = os.path.join(folder, name)
    try:
        created = api.File.create(path, part.size)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"this rank cannot create '{path}': save to the same folder on all ranks of a host"
        ) from None
    with created as file:
        todo, at = [], 0
        for _, size, what in itertools.chain(*runs.values()):
            todo.append((at, size, what))
            at += size
        rows = writer.write(file, todo)
        file.sync()
    return _WrittenPart(name, part, FileRecord.of(name, part.size, rows))


# --- copies on other hosts ------------------------------------------------------------------------


def _copy_parts(
    comm: api.Comm, per_host: PerHost, folder: str, written: Sequence[_WrittenPart]
) -> None:
    """Copy the part files of the hosts before this one. Collective."""
    hosts = per_host.hosts
    assert per_host.group is not None, "the caller checks this"
    copies = [
        (each, hosts.peer(each.part.rank, host))
        for each in written
        for host in hosts.after(each.part.rank, per_host.replicas)
    ]
    copied = [each for each, reader in copies if reader == comm.rank]
    clients = {reader for each, reader in copies if each.part.rank == comm.rank}
    paths = {each.name: os.path.join(folder, each.name) for each in written}
    writers = {each.name: each.part.rank for each in copied}
    served = RemoteParts(per_host.group, list(paths), paths, writers, sorted(clients), hosts.names)
    with served as remote, on_all_ranks(comm):
        for each in copied:
            read = functools.partial(remote.read, each.name)
            if FileRecord.copy(paths[each.name], each.record.size, read) != each.record:
                raise RuntimeError(f"'{paths[each.name]}' was changed on its way from another host")
