"""zshard.save(per_host=True): each host writes what its ranks hold to its own disk.

Each rank writes a part file, and rank 0 a second one of what all hosts get: headers, and tensors
without shards. Each host has a manifest, the same on all hosts, that says what is in all part files
(parts.py). Replicas on several hosts each write their shards. So a host has all that its ranks load
in the same layout. Only when every host has synced everything do they rename their folders into
place, and only when all have done so do they delete older checkpoints: a host that is lost in
between leaves the checkpoint before this one complete.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

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
    bar,
    gather,
    gather_bytes,
    on_all_ranks,
    write_text,
)
from zshard.extras.per_host.hosts import Hosts, id_at, send
from zshard.extras.per_host.parts import PartRecord, is_complete

_ON_ALL_HOSTS = f"all-hosts{PART}"


def writer(comm: api.Comm) -> tuple[Callable[[SavePlan, api.Comm], None], Sequence[int]]:
    """Return the function that carries out a plan, and the ranks of this host, which write together
    what they all hold. Collective."""
    hosts = Hosts(comm)
    return functools.partial(write_parts, hosts=hosts), hosts.near


@PublicCall("save()")
def write_parts(plan: SavePlan, comm: api.Comm, hosts: Hosts) -> None:
    """Execute the plan. Collective; `comm` belongs to this thread."""
    _refuse_shared_folder(comm, hosts, plan.target, plan.id)
    with on_all_ranks(comm):
        earlier = id_at(plan.target.path), is_complete(plan.target.path)
    ids, complete = zip(*gather(comm, earlier), strict=True)
    # What only some hosts have is the remains of an interrupted save, unless one host has all.
    is_remains = len(set(ids)) > 1 and not any(complete)
    staging = Staging(plan.target, plan.id, overwrite=True if is_remains else None)
    try:
        with on_all_ranks(comm):
            if hosts.leads:
                staging.open()
        writer = Writer(plan)
        size = functools.partial(plan.size, headers=True, texts=True)
        with on_all_ranks(comm), torch.no_grad(), bar("saving", size, comm.rank == 0):
            rows = list(_write_parts(plan, staging.path, comm, hosts, writer))
        written = [row for of_rank in gather(comm, rows) for row in of_rank]
        records = {name: FileRecord(size, tuple(sums)) for name, _, size, sums in written}
        names = writer.strange_on_any(comm)
        shared = os.path.join(staging.path, _ON_ALL_HOSTS)
        gets_it = hosts.leads and comm.rank != 0
        send(comm, 0, shared, records[_ON_ALL_HOSTS], shared if gets_it else None)
        with on_all_ranks(comm):
            text = b""
            if comm.rank == 0:
                parts = {name: entry for name, entry, _, _ in written}
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


def _write_parts(
    plan: SavePlan, folder: str, comm: api.Comm, hosts: Hosts, writer: Writer
) -> Iterator[tuple[str, dict[str, Any], int, Sequence[int]]]:
    """Write this rank's part files that are not empty, and sync them. Yield the name, the entry in
    the manifest, the size and the checksums of each."""
    name = f"rank-{comm.rank:05}-of-{comm.world:05}{PART}"
    sharded = replace(plan, pieces=[piece for piece in plan.pieces if not piece.is_whole])
    todo = {name: sharded.runs(headers=False, texts=False)}
    if comm.rank == 0:
        whole = replace(plan, pieces=[piece for piece in plan.pieces if piece.is_whole])
        todo[_ON_ALL_HOSTS] = whole.runs(headers=True, texts=True)
    for name, runs in todo.items():
        ranges = {file: [(offset, n) for offset, n, _ in of_file] for file, of_file in runs.items()}
        part = PartRecord(hosts.names[comm.rank], comm.rank, ranges)
        if part.size > 0:
            record = _write_part(os.path.join(folder, name), part.size, runs, writer)
            yield name, part.entry, part.size, record.checksums


def _write_part(
    path: str, size: int, runs: Mapping[str, Sequence[Any]], writer: Writer
) -> FileRecord:
    try:
        created = api.File.create(path, size)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"this rank cannot create '{path}': save to the same folder on all ranks of a host"
        ) from None
    with created as file:
        todo, at = [], 0
        for _, length, what in (run for of_file in runs.values() for run in of_file):
            todo.append((at, length, what))
            at += length
        rows = writer.write(file, todo)
        file.sync()
    return FileRecord.of(path, size, rows)
