"""Bring the parts of a checkpoint together, whose hosts share no disk.

In one process, into one ordinary folder, from folders that were copied or mounted from the hosts;
or under torchrun on the hosts themselves, where each host gets the part files that it lacks.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

import torch.distributed as dist
from torch import nn

from zshard.api import NAME as MANIFEST
from zshard.api import (
    CheckpointError,
    Comm,
    FileRecord,
    Manifest,
    OpenFile,
    PublicCall,
    Staging,
    Target,
    gather,
    gather_bytes,
    make_default_group,
    names_at,
    on_all_ranks,
    ranks_of,
    write_text,
)
from zshard.extras.per_host.hosts import Hosts, by_age, id_at, place_in, send
from zshard.extras.per_host.parts import Spread


def collect(paths: Sequence[str]) -> str | None:
    """Collect the newest checkpoint. Collective under torchrun.

    paths: where the hosts have it, checkpoints or checkpoint directories, and at the end the folder
        to create. Under torchrun only one: where each host has it, or gets it.

    Returns a line about what was done; None on ranks other than the first. Raises CheckpointError
    if parts are missing or damaged, naming the host and the file; OSError if the system refuses.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return _collect_on_hosts(paths)
    *folders, out = paths
    if not folders:
        raise ValueError("in one process, pass the folders with parts, and the folder to create")
    names = [names_at(folder) for folder in folders]
    places = [place_in(folder, _newest(names, folders[0])) for folder in folders]
    first = next(place for place in places if id_at(place))
    with closing(Spread(first, _in_parts(Manifest.read(first), first), places)) as spread:
        spread.check()
        spread.blocks().check()
        return _write(spread, out)


def _newest(names: Sequence[Sequence[str]], path: str) -> str:
    if not any(names):
        raise CheckpointError(f"no finished checkpoint in '{path}'")
    return by_age(names)[0]


def _in_parts(manifest: Manifest, path: str) -> Manifest:
    if not manifest.whole:
        raise CheckpointError(f"'{path}' is not in parts: it needs no collecting")
    return manifest


def _write(spread: Spread, out: str) -> str:
    """Write all files of a Spread, and a manifest without parts."""
    staging = Staging(Target.of(out, None), secrets.token_hex(16), overwrite=None)
    records: dict[str, FileRecord] = {}
    try:
        staging.open()
        for name, size in spread.manifest.whole.items():
            source = spread.open(name, OpenFile)
            records[name] = FileRecord.copy(
                os.path.join(staging.path, name), size, source.read_into
            )
        more = {name: entry for name, entry in spread.manifest.more.items() if name != "parts"}
        manifest = replace(spread.manifest, files=records, whole={}, more=more)
        write_text(os.path.join(staging.path, MANIFEST), manifest.dump())
        staging.commit()
    finally:
        staging.discard()
        staging.close()
    total = sum(record.size for record in records.values())
    return f"wrote {total:,} bytes in {len(records)} files to '{out}'"


# --- on the hosts ---------------------------------------------------------------------------------


@PublicCall("collect()")
def _collect_on_hosts(paths: Sequence[str]) -> str | None:
    if len(paths) != 1:
        raise ValueError("under torchrun, pass one path, where each host has its parts or gets all")
    with ExitStack() as stack:
        if not dist.is_initialized():
            make_default_group("gloo")
            stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
        comm = ranks_of(nn.Module())
        folder = place_in(paths[0], _newest(gather(comm, names_at(paths[0])), paths[0]))
        count = _complete(comm, Hosts(comm), folder)
        line = f"sent {count} part files: all hosts have all of '{folder}'"
        return line if comm.rank == 0 else None


def _complete(comm: Comm, hosts: Hosts, folder: str) -> int:
    """Give each host the part files and the manifest that it lacks. Collective. Return how many
    part files were sent. Raise CheckpointError if no host has some bytes."""
    where = os.path.join(folder, MANIFEST)
    with on_all_ranks(comm):
        id, text = id_at(folder), b""
    ids = gather(comm, id)
    first = ids.index(max(ids, key=bool))
    with on_all_ranks(comm):
        if comm.rank == first:
            with OpenFile(where, follow=False) as file:
                text = bytes(file.bytes_of(file.size))
    text = gather_bytes(comm, text)[first]
    with on_all_ranks(comm):
        manifest = _in_parts(Manifest.parse(text, where), folder)
        if id not in ("", manifest.id):
            raise CheckpointError(f"'{folder}' is another checkpoint here than on other hosts")
        here = Spread(folder, manifest, [folder] if id else []).here
    holders: dict[str, int] = {}
    for rank, names in enumerate(gather(comm, list(here))):
        for name in names:
            holders.setdefault(name, rank)
    with on_all_ranks(comm):
        Spread(folder, manifest, [folder] if id else [], elsewhere=holders).check()
        if hosts.leads:
            os.makedirs(folder, exist_ok=True)
    count = 0
    for name, holder in holders.items():
        if not any(gather(comm, name not in here)):
            continue
        path, count = os.path.join(folder, name), count + 1
        to = f"{path}.tmp" if hosts.leads and name not in here else None
        with on_all_ranks(comm), suppress(FileNotFoundError):
            if to is not None:
                os.remove(to)  # of an earlier attempt
        send(comm, holder, path, manifest.files[name], to)
        with on_all_ranks(comm):
            if to is not None:
                os.rename(to, path)
    with on_all_ranks(comm):
        if hosts.leads and not id:
            write_text(where, text)
    return count
