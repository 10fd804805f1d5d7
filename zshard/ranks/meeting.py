"""Connect ranks: over shared memory on one host, in two levels on several, or find out why not.

A rank that fails reports that in the exchange that all ranks make anyway, so all ranks get the same
result: either each has a transport, or none has, with one reason, causes first. Two levels need
hosts of the same kind: equally many ranks each, neighbors in rank order, that can connect over shm.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from zshard import _core
from zshard.ranks.agreement import gather_objects
from zshard.ranks.counterparts import UnreachableError, meet
from zshard.ranks.groups import Group, new_subgroup

_SHOWN = 2  # show the reasons of so many ranks
_SPARE = 16  # file descriptors besides those of a group's connections


class Refusal(NamedTuple):
    """The reason why shm is not available; the same on all ranks.

    hosts: the host of each rank. shortage: why c10d would fail as well; "" if it would not.
    """

    reason: str
    hosts: list[str]
    shortage: str


_Problem = tuple[str, bool]  # (text, is a consequence: of a peer that did not answer)


def connect_shm(group: Group, timeout: float) -> _core.Comm | Refusal:
    """Return the shm transport of `group` if all ranks can connect to each other. Collective."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    comm, problem = None, None
    free = free_descriptors()
    try:
        comm = _core.Comm.shm(rank, world, timeout)
    except Exception as error:  # MemoryError too: the others wait below
        problem = _problem_of(error, False)
    offer = host_id(), comm.address if comm else "", os.urandom(16), problem, free
    hosts, addresses, tokens, problems, left = zip(*gather_objects(offer, group), strict=True)
    count = len(set(hosts))
    if count > 1:
        return Refusal(f"the ranks are on {count} hosts, and shm connects one", list(hosts), "")
    if comm is not None and not any(problems):
        try:
            comm.connect(list(addresses), tokens[0])
        except Exception as error:
            problem = _problem_of(error, isinstance(error, NotImplementedError))
        problems = tuple(gather_objects(problem, group))
        if not any(problems):
            return comm
    return Refusal(_join(problems), list(hosts), _shortage(left))


def _problem_of(error: Exception, is_consequence: bool) -> _Problem:
    return (isinstance(error, OSError) and error.strerror) or str(error), is_consequence


def _join(problems: Sequence[_Problem | None]) -> str:
    """Return the problems as one text, causes before consequences."""
    ranked = sorted((each[1], rank, each[0]) for rank, each in enumerate(problems) if each)
    causes = [each for each in ranked if not each[0]] or ranked
    shown = causes[:_SHOWN]
    texts = [text if text.startswith("rank ") else f"rank {r}: {text}" for _, r, text in shown]
    more = len(causes) - len(shown)
    return "; ".join(texts) + (f"; and likewise on {more} more" if more else "")


def _shortage(free: Sequence[int | None]) -> str:
    """Return why the group cannot open a connection between all ranks; "" if it can."""
    needed = len(free) + _SPARE
    low = ((rank, n) for rank, n in enumerate(free) if n is not None and n < needed)
    return next(
        (f"rank {r} has {n} file descriptors left of {needed}: raise ulimit -n" for r, n in low), ""
    )


def free_descriptors() -> int | None:
    """Return how many more file descriptors this process may open; None if unknown."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        count = len(os.listdir("/proc/self/fd")) - 1  # minus the directory's own
    except OSError:
        return None
    return None if limit == resource.RLIM_INFINITY else max(limit - count, 0)


def host_id() -> str:
    """Return a text that is equal for processes on one host: ZSHARD_HOST if it is set."""
    if named := os.environ.get("ZSHARD_HOST"):
        return named
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # some sandboxes hide it
        boot = ""
    return f"{socket.gethostname()}/{boot}"


def ranks_per_host(hosts: Sequence[str]) -> int:
    """Return the number of ranks of each host, given the host of each rank in rank order.

    0: all ranks are on one host, or hosts have different numbers of ranks, or ranks of one host are
    not neighbors.
    """
    size = 1
    while size < len(hosts) and hosts[size] == hosts[0]:
        size += 1
    blocks = [set(hosts[at : at + size]) for at in range(0, len(hosts), size)]
    alike = len(hosts) % size == 0 and all(len(block) == 1 for block in blocks)
    different = len(set().union(*blocks)) == len(blocks)
    return size if alike and different and len(blocks) > 1 else 0


def connect_hosts(
    group: Group, inner: Group, hosts: Sequence[str], timeout: float
) -> _core.Comm | str:
    """Return the transport in two levels, or the reason why there is none. Collective.

    inner: zshard's process group of the same ranks.
    """
    size = ranks_per_host(hosts)
    if len(set(hosts)) == 1:
        return "all ranks are on one host"
    if size == 0:
        return "the hosts must have the same number of ranks each, neighbors in rank order"
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    ranks = dist.get_process_group_ranks(group)
    met: _core.Comm | Refusal = _core.Comm.alone("cpu")
    if size > 1:
        first = rank // size * size
        met = connect_shm(new_subgroup(ranks[first : first + size], "gloo"), timeout)
    reasons = gather_objects(met.reason if isinstance(met, Refusal) else "", group)
    if any(reasons) or isinstance(met, Refusal):
        return f"the ranks of a host cannot connect over shm: {next(filter(None, reasons))}"
    try:
        with contextlib.ExitStack() as stack:  # the transport copies the sockets
            sockets = meet(group, range(rank % size, world, size), timeout, stack)
            numbers = array("i", [each.fileno() if each else -1 for each in sockets]).tobytes()
            return _core.Comm.hosts(inner.group_name, numbers, met, rank, world, timeout)
    except UnreachableError as error:
        return f"ranks of different hosts cannot connect: {error}"
