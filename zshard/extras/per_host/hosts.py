"""The hosts of a checkpoint in parts: which checkpoint all have, and sending a file to others."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack, suppress

import torch
from torch import nn

from zshard import api
from zshard.api import (
    BLOCK,
    CheckpointError,
    FileBlocks,
    FileRecord,
    Manifest,
    OpenFile,
    bare,
    bytes_of,
    gather,
    names_at,
    on_all_ranks,
    path_of,
    ranks_of,
    warn_on_rank_0,
)

_CHUNK = 2**24  # bytes


class Hosts:
    """The hosts of a transport's ranks."""

    def __init__(self, comm: api.Comm) -> None:
        """Collective."""
        self.of: list[str] = gather(comm, api.host_id())  # by rank
        self.all = list(dict.fromkeys(self.of))
        self.near = [rank for rank, host in enumerate(self.of) if host == self.of[comm.rank]]
        self.leads = self.near[0] == comm.rank  # whether this rank is the first one of its host
        self.names = [host.partition("/")[0] or host for host in self.of]  # by rank, for people


# --- which checkpoint -----------------------------------------------------------------------------


def by_age(names: Iterable[Iterable[str]]) -> list[str]:
    """Return the names that hosts have, newest first."""
    return sorted(set().union(*names), key=lambda name: (len(name), name), reverse=True)


def place_in(path: str, name: str) -> str:
    """Return the folder of a checkpoint of names_at(path)."""
    return os.path.join(path, name) if name else path


def id_at(folder: str) -> str:
    """Return the id of the checkpoint in a folder; "" for none."""
    return Manifest.read(folder).id if os.path.lexists(os.path.join(folder, api.NAME)) else ""


def common_checkpoint(comm: api.Comm, path: str) -> str:
    """Return the path of the newest checkpoint at `path` that all hosts have. Collective. Warn of
    newer ones that only some have. Raise CheckpointError if there is none."""
    everyone = gather(comm, names_at(path))
    skipped: list[str] = []
    for name in by_age(everyone):
        folder = place_in(path, name)
        with on_all_ranks(comm):
            id = id_at(folder)
        if len(set(gather(comm, id))) == 1:
            if skipped:
                text = f"'{path}': not all hosts have {', '.join(skipped)}: '{name}' is taken"
                warn_on_rank_0(comm, text, RuntimeWarning)
            return folder
        skipped.append(f"'{name or path}'")
    hosts = Hosts(comm)
    without = [host for host, names in zip(hosts.names, everyone, strict=True) if not names]
    lack = f"the host '{without[0]}' has none" if without else "the hosts have different ones"
    remedy = f"bring it to all with `torchrun ... -m zshard ckpt collect {path}`"
    raise CheckpointError(f"no checkpoint in '{path}' that all hosts have, {lack}: {remedy}")


def latest_of_hosts(directory: str | os.PathLike[str], model: nn.Module) -> str | None:
    """Carry out zshard.latest_checkpoint(directory, model)."""
    comm = ranks_of(bare(model))
    with on_all_ranks(comm):
        path = path_of(directory)
        with suppress(FileNotFoundError):
            os.listdir(path)  # for its other errors
        names = names_at(path)
    return common_checkpoint(comm, path) if any(gather(comm, bool(names))) else None


# --- from one host to the others ------------------------------------------------------------------


def send(comm: api.Comm, root: int, source: str, record: FileRecord, to: str | None) -> None:
    """Copy the file `source` of rank `root` to the path `to` of each rank that has one, sync it and
    verify it. Collective."""
    chunk = torch.empty(min(_CHUNK, record.size), dtype=torch.uint8)
    with ExitStack() as stack:
        with on_all_ranks(comm):
            if comm.rank == root:
                reader = stack.enter_context(OpenFile(source, follow=False))
                _verify(reader, record)
            if to is not None:
                file = stack.enter_context(api.File.create(to, record.size))
        for offset in range(0, record.size, _CHUNK):
            data = chunk[: min(_CHUNK, record.size - offset)]
            with on_all_ranks(comm):
                if comm.rank == root:
                    reader.read_into(bytes_of(data), offset)
            comm.broadcast(data, root)
            with on_all_ranks(comm):
                if to is not None:
                    file.write([(offset, bytes_of(data))], BLOCK)
        with on_all_ranks(comm):
            if to is not None:
                file.sync()
                _verify(stack.enter_context(OpenFile(to, follow=False)), record)


def _verify(file: OpenFile, record: FileRecord) -> None:
    blocks = FileBlocks()
    blocks.add(file, record, range(len(record.checksums)))
    blocks.check()
