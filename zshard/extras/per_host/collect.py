"""Make one ordinary folder of a checkpoint in parts, whose hosts share no disk.

In one process, from folders that were copied or mounted from the hosts; or under torchrun on the
hosts themselves, where the first rank reads the other hosts' part files over the wire.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch.distributed as dist
from torch import nn

from zshard.api import NAME as MANIFEST
from zshard.api import (
    CheckpointError,
    FileRecord,
    OpenFile,
    PublicCall,
    Staging,
    Target,
    make_default_group,
    on_all_ranks,
    ranks_of,
    write_text,
)
from zshard.extras.per_host.hosts import folders_together, opened_together
from zshard.extras.per_host.parts import Spread


def collect(folders: Sequence[str], out: str) -> str | None:
    """Collect a checkpoint in the folder `out`, which is created. Collective under torchrun.

    folders: where the hosts have it: checkpoints, or checkpoint directories, whose newest complete
        checkpoint is taken. Under torchrun only one, which each host has.

    Returns a line about what was done; None on ranks other than the first. Raises CheckpointError
    if parts are missing or damaged, naming the host and the file; OSError if the system refuses.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return _collect_from_hosts(folders, out)
    spread = folders_together(folders)
    try:
        spread.blocks().check()
        return _write(spread, out)
    finally:
        spread.close()


@PublicCall("collect()")
def _collect_from_hosts(folders: Sequence[str], out: str) -> str | None:
    if len(folders) != 1:
        raise ValueError("under torchrun, pass one folder, which each host has under this path")
    with ExitStack() as stack:
        if not dist.is_initialized():
            make_default_group("gloo")
            stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
        comm = ranks_of(nn.Module())
        path, spread = opened_together(stack, comm, folders[0])
        if spread is None:
            raise CheckpointError(f"'{path}' is not in parts: it needs no collecting")
        everything = [(name, 0, size) for name, size in spread.manifest.whole.items()]
        blocks = spread.own_blocks(comm, everything if comm.rank == 0 else ())
        with on_all_ranks(comm):
            blocks.check()
        line = None
        with on_all_ranks(comm):
            if comm.rank == 0:
                line = _write(spread, out)
        return line


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
