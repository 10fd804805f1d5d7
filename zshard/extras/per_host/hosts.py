"""Checkpoints of hosts that share no disk: which host has what, and finding them together.

Every host reports what its folder has, and all ranks draw the same conclusion from the reports:
which checkpoint is the newest whose part files are all there, on whatever host, and which rank
reads which part file from which other one. Hosts may have gone, come or changed their order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import torch
from torch import nn

from zshard import api
from zshard.api import (
    BLOCK,
    CheckpointError,
    FileBlocks,
    Manifest,
    OpenFile,
    bare,
    gather,
    gather_bytes,
    group_beside,
    names_at,
    on_all_ranks,
    path_of,
    ranks_of,
    warn_on_rank_0,
)
from zshard.extras.per_host.parts import Spread, part_files_in, parts_of
from zshard.extras.per_host.remote import RemoteParts

_CPU = torch.device("cpu")


class Hosts:
    """The hosts of a transport's ranks."""

    def __init__(self, comm: api.Comm) -> None:
        """Collective."""
        self.of: list[str] = gather(comm, api.host_id())  # by rank
        self.rank = comm.rank
        self.all = list(dict.fromkeys(self.of))
        self.near = self.ranks(self.of[comm.rank])

    def ranks(self, host: str) -> list[int]:
        """Return the ranks of a host."""
        return [rank for rank, each in enumerate(self.of) if each == host]

    @property
    def leads(self) -> bool:
        """Whether this rank is the first one of its host."""
        return self.near[0] == self.rank

    def peer(self, rank: int, host: str) -> int:
        """Return the rank of another host that serves `rank`."""
        there = self.ranks(host)
        return there[self.ranks(self.of[rank]).index(rank) % len(there)]

    def after(self, rank: int, count: int) -> list[str]:
        """Return the `count` hosts that follow the host of `rank`, in a circle."""
        here = self.all.index(self.of[rank])
        return [self.all[(here + i) % len(self.all)] for i in range(1, count + 1)]

    @property
    def names(self) -> list[str]:
        """The names of the hosts, by rank, for people."""
        return [each.partition("/")[0] or each for each in self.of]


# --- which checkpoint -----------------------------------------------------------------------------


class HostReport(NamedTuple):
    """What a rank reports of a checkpoint: its id, and the part files that its host has."""

    id: str = ""  # "" for none
    parts: Sequence[str] = ()
    needed: int = 0  # how many part files there are
    problem: str = ""  # why the manifest cannot be read


class HostsCheckpoint(NamedTuple):
    """A checkpoint in parts that some hosts have."""

    id: str
    holders: dict[str, list[str]]  # the hosts that have a part file, by its name
    is_complete: bool


def by_age(names: Iterable[str]) -> list[str]:
    """Return the names without duplicates, newest first; only "" if it is among them."""
    unique = set(names)
    return [""] if "" in unique else sorted(unique, key=lambda n: (len(n), n), reverse=True)


def look(
    comm: api.Comm, hosts: Hosts, folder: str
) -> tuple[HostsCheckpoint | None, list[HostReport]]:
    """Return the checkpoint that the hosts have together in a folder, preferring a complete one,
    and what each rank reports. Collective."""
    reports = [HostReport(*each) for each in gather(comm, report_of(folder))]
    return together(hosts.of, reports), reports


def together(hosts: Sequence[str], reports: Sequence[HostReport]) -> HostsCheckpoint | None:
    """Return the checkpoint that hosts have together, preferring a complete one.

    reports: by each one of `hosts`, in which hosts may occur more than once.
    """
    checkpoints = []
    for id in dict.fromkeys(each.id for each in reports if each.id):
        holders: dict[str, list[str]] = {}
        for host, each in zip(hosts, reports, strict=True):
            for part in each.parts if each.id == id else ():
                if host not in holders.setdefault(part, []):
                    holders[part].append(host)
        needed = next(each.needed for each in reports if each.id == id)
        # Without part files, it is on a disk that hosts should share.
        is_whole = len(holders) == needed and (needed or all(each.id == id for each in reports))
        checkpoints.append(HostsCheckpoint(id, holders, bool(is_whole)))
    return max(checkpoints, key=lambda each: each.is_complete, default=None)


def report_of(folder: str) -> HostReport:
    where = os.path.join(folder, api.NAME)
    if not os.path.lexists(where):
        return HostReport()
    try:
        manifest = Manifest.read(folder)
        parts = parts_of(manifest, folder)
    except (OSError, CheckpointError) as error:
        return HostReport(problem=str(error))
    return HostReport(manifest.id, list(part_files_in(folder, parts)), len(parts))


class Chosen(NamedTuple):
    """A checkpoint that was chosen of several."""

    name: str  # of the folder; "" for the path itself
    checkpoint: HostsCheckpoint
    reports: list[HostReport]
    skipped: list[str]  # names of newer ones that are incomplete


def newest(
    names: Iterable[str],
    look_at: Callable[[str], tuple[HostsCheckpoint | None, list[HostReport]]],
    path: str,
) -> Chosen:
    """Return the newest complete checkpoint; if none is complete, the newest. Raise CheckpointError
    if no manifest can be read.

    names: newest first. path: names them in messages.
    """
    others: list[Chosen] = []
    problems: list[str] = []
    for name in names:
        checkpoint, reports = look_at(name)
        problems += [each.problem for each in reports if each.problem]
        if checkpoint is None:
            continue
        if checkpoint.is_complete:
            return Chosen(name, checkpoint, reports, [each.name for each in others])
        others.append(Chosen(name, checkpoint, reports, []))
    if not others:
        raise CheckpointError(problems[0] if problems else f"no finished checkpoint in '{path}'")
    return others[0]


def choose(comm: api.Comm, hosts: Hosts, path: str) -> Chosen:
    """Return the newest checkpoint at `path` that the hosts have together. Collective. Warn of
    newer ones that are incomplete."""
    names = by_age(name for each in gather(comm, names_at(path)) for name in each)
    chosen = newest(names, lambda name: look(comm, hosts, os.path.join(path, name)), path)
    if chosen.skipped:
        listed = ", ".join(f"'{name}'" for name in chosen.skipped)
        text = f"'{path}': the hosts lack parts of {listed}: '{chosen.name}' is taken"
        warn_on_rank_0(comm, text, RuntimeWarning)
    return chosen


def latest_of_hosts(directory: str | os.PathLike[str], model: nn.Module) -> str | None:
    """Carry out zshard.latest_checkpoint(directory, model)."""
    comm = ranks_of(bare(model))
    path = path_of(directory)
    names: list[str] = []
    with on_all_ranks(comm):
        with suppress(FileNotFoundError):
            os.listdir(path)  # for its other errors
        names += names_at(path)
    if not any(gather(comm, bool(names))):
        return None
    return os.path.join(path, choose(comm, Hosts(comm), path).name)


def folders_together(paths: Sequence[str]) -> Spread:
    """Open the newest complete checkpoint in parts that folders have together, each with the part
    files of some hosts. Raise CheckpointError, which names the missing hosts, if there is none."""
    where = ", ".join(f"'{path}'" for path in paths)
    names = by_age(name for path in paths for name in names_at(path))

    def look_at(name: str) -> tuple[HostsCheckpoint | None, list[HostReport]]:
        reports = [report_of(os.path.join(path, name)) for path in paths]
        return together(paths, reports), reports

    chosen = newest(names, look_at, where)
    folders = [os.path.join(path, chosen.name) if chosen.name else path for path in paths]
    reports = zip(folders, chosen.reports, strict=True)
    folders = [folder for folder, report in reports if report.id == chosen.checkpoint.id]
    manifest = Manifest.read(folders[0])
    if not manifest.whole:
        raise CheckpointError(f"'{folders[0]}' is not in parts: it needs no collecting")
    spread = Spread(folders[0], manifest, folders)
    if not spread.is_complete():
        raise CheckpointError(f"'{folders[0]}' is incomplete: {spread.missing()}")
    return spread


# --- opening --------------------------------------------------------------------------------------


class HostsSpread(Spread):
    """A checkpoint in parts, open on all ranks."""

    def __init__(
        self,
        path: str,
        manifest: Manifest,
        hosts: Hosts,
        checkpoint: HostsCheckpoint,
        is_here: bool,
    ) -> None:
        """is_here: whether this host has it, as far as it does."""
        self._hosts = hosts
        # For each rank, whom it reads other hosts' part files from.
        self.servers = [_servers(hosts, checkpoint.holders, rank) for rank in range(len(hosts.of))]
        super().__init__(path, manifest, [path] * is_here, self.servers[hosts.rank])

    def own_blocks(self, comm: api.Comm, wanted: Iterable[tuple[str, int, int]]) -> FileBlocks:
        """Return those that its host has, or that it sends to other hosts, of all blocks that ranks
        will read."""
        marks: dict[str, int] = {}
        for file, begin, end in wanted:
            for place in self.places(file, begin, end):
                first, last = place.at // BLOCK, -(-(place.at + place.length) // BLOCK)
                marks[place.part] = marks.get(place.part, 0) | (1 << last) - (1 << first)
        ours: dict[str, int] = {}
        reports = {name: f"{mask:x}" for name, mask in marks.items()}
        for rank, reported in enumerate(gather(comm, reports)):
            for name, mask in reported.items():
                source = self.servers[rank].get(name, rank)
                if self._hosts.of[source] == self._hosts.of[comm.rank]:
                    ours[name] = ours.get(name, 0) | int(mask, 16)
        near = self._hosts.near
        return self.blocks(ours).share(near.index(comm.rank), len(near))


def opened_together(stack: ExitStack, comm: api.Comm, path: str) -> tuple[str, HostsSpread | None]:
    """Open the checkpoint in parts that the hosts have at a path, which `stack` closes. None if
    what is there is not in parts. Collective. Also return the path of the checkpoint.

    Raises CheckpointError, which names the lost hosts, if hosts do not have all part files.
    """
    hosts = Hosts(comm)
    name, checkpoint, reports, _ = choose(comm, hosts, path)
    folder = os.path.join(path, name) if name else path
    first = next(rank for rank, each in enumerate(reports) if each.id == checkpoint.id)
    text, where = b"", os.path.join(folder, api.NAME)
    with on_all_ranks(comm):
        if comm.rank == first:
            with OpenFile(where, follow=False) as file:
                text = bytes(file.bytes_of(file.size))
    manifest = Manifest.parse(gather_bytes(comm, text)[first], where)
    if not manifest.whole:
        return folder, None
    spread = HostsSpread(
        folder, manifest, hosts, checkpoint, reports[comm.rank].id == checkpoint.id
    )
    servers = spread.servers
    if any(servers):
        clients = [rank for rank, of in enumerate(servers) if comm.rank in of.values()]
        group = group_beside(comm, _CPU)
        remote = RemoteParts(
            group, list(spread.parts), spread.here, servers[comm.rank], clients, hosts.names
        )
        spread.read_remote = stack.enter_context(remote).read
    stack.callback(spread.close)
    with on_all_ranks(comm):
        if not spread.is_complete():
            raise CheckpointError(f"'{folder}' is incomplete: {spread.missing()}")
    return folder, spread


def _servers(hosts: Hosts, holders: Mapping[str, list[str]], rank: int) -> dict[str, int]:
    """Return the ranks that `rank` reads part files from which its own host does not have. If
    several hosts have one, the ranks of a host share them."""
    here = hosts.of[rank]
    return {
        name: hosts.peer(rank, there[rank % len(there)])
        for name, there in holders.items()
        if here not in there
    }
