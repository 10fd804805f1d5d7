"""Bring the parts of a checkpoint together, whose hosts share no disk.

In one process, into one ordinary folder, from folders that were copied or mounted from the hosts;
or under torchrun on the hosts themselves, where each host gets the part files that it lacks.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import TypeVar

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
    warn,
    write_text,
)
from zshard.extras.per_host.hosts import Hosts, by_age, id_at, place_in, send
from zshard.extras.per_host.parts import Spread

_Result = TypeVar("_Result")


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
    with closing(_newest([names_at(folder) for folder in folders], folders[0], folders)) as spread:
        spread.blocks().check()
        return _write(spread, out)


def _newest(names: Sequence[Sequence[str]], path: str, folders: Sequence[str]) -> Spread:
    """Return the newest complete checkpoint in these folders. Raise the error of the newest one if
    none is complete."""

    def look(name: str) -> Spread:
        places = [place for each in folders if id_at(place := place_in(each, name))]
        if len({id_at(place) for place in places}) != 1:
            raise CheckpointError(
                f"'{', '.join(places)}' are different checkpoints: pass folders of one"
            )
        manifest = _in_parts(Manifest.read(places[0]), places[0])
        spread = Spread(places[0], manifest, places, elsewhere=())
        spread.check()
        return spread

    return _first_complete(names, path, look)


def _first_complete(
    names: Iterable[Iterable[str]], path: str, look: Callable[[str], _Result]
) -> _Result:
    """Return what `look` returns of the newest checkpoint that is complete; warn of newer ones."""
    errors: list[CheckpointError] = []
    for name in by_age(names):
        try:
            result = look(name)
        except CheckpointError as error:
            errors.append(error)
        else:
            for each in errors:
                warn(f"an older checkpoint was collected: {each}", RuntimeWarning)
            return result
    raise errors[0] if errors else CheckpointError(f"no finished checkpoint in '{path}'")


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
        hosts = Hosts(comm)

        def look(name: str) -> str:
            folder = place_in(paths[0], name)
            count = _complete(comm, hosts, folder)
            return f"sent {count} part files: all hosts have all of '{folder}'"

        line = _first_complete(gather(comm, names_at(paths[0])), paths[0], look)
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
