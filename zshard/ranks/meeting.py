"""Ranks of one host meet over shared memory, or learn why they cannot.

A rank that fails tells the others in the exchange that they are in anyway, so all
ranks get the same answer: each has a transport, or none has, with one reason, causes first.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from zshard import _core
from zshard.ranks.objects import gather_objects

_SHOWN = 2  # reasons of so many ranks
_SPARE = 16  # file descriptors besides those of a group's connections


class Refusal(NamedTuple):
    """Why shm is not available; the same on all ranks.

    hosts: the host of each rank. shortage: why c10d would fail as well; "" if nothing speaks
    against it.
    """

    reason: str
    hosts: list[str]
    shortage: str

    @property
    def one_host(self) -> bool:
        """Whether shared memory is within reach, so that another transport is a loss."""
        return len(set(self.hosts)) == 1


class _Offer(NamedTuple):
    """What a rank tells the others before they connect."""

    host: str
    address: str
    token: bytes
    problem: _Problem | None
    free: int | None  # file descriptors; None: not known


class _Problem(NamedTuple):
    """own: on this rank, and not that a peer did not answer, which is a consequence."""

    text: str
    own: bool


def meet(group: Any, timeout: float) -> _core.Comm | Refusal:
    """Return the shm transport of `group` if all ranks can connect to each other. Collective."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    comm, problem = None, None
    free = free_descriptors()
    try:
        comm = _core.Comm.shm(rank, world, timeout)
    except Exception as error:  # MemoryError too: the others wait below
        problem = _Problem(_text_of(error), True)
    address = comm.address if comm else ""
    mine = _Offer(host_id(), address, os.urandom(16), problem, free)
    offers = [_Offer(*offer) for offer in gather_objects(tuple(mine), group)]
    hosts = [offer.host for offer in offers]
    count = len(set(hosts))
    if count > 1:
        reason = f"the ranks are on {count} hosts, and shm connects only ranks of one host"
        return Refusal(reason, hosts, "")
    problems = [offer.problem for offer in offers]
    if comm is not None and not any(problems):
        try:
            comm.connect([offer.address for offer in offers], offers[0].token)
        except Exception as error:
            problem = _Problem(_text_of(error), not isinstance(error, NotImplementedError))
        problems = gather_objects(problem, group)
        if not any(problems):
            return comm
    problems = [None if each is None else _Problem(*each) for each in problems]
    return Refusal(_join(problems), hosts, _shortage([offer.free for offer in offers]))


def _text_of(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _join(problems: Sequence[_Problem | None]) -> str:
    """Return the problems as one text, causes before consequences."""
    found = [(not each.own, rank, each.text) for rank, each in enumerate(problems) if each]
    own = sum(not consequence for consequence, _, _ in found)
    shown = sorted(found)[: min(_SHOWN, own or _SHOWN)]
    texts = [text if text.startswith("rank ") else f"rank {r}: {text}" for _, r, text in shown]
    more = (own or len(found)) - len(shown)
    return "; ".join(texts) + (f"; and likewise on {more} more" if more else "")


def _shortage(free: Sequence[int | None]) -> str:
    """Return why the group cannot open a connection between all ranks; "" if it can."""
    needed = len(free) + _SPARE
    for rank, each in enumerate(free):
        if each is not None and each < needed:
            return (
                f"rank {rank} has {each} file descriptors left, and c10d needs up to {needed} for "
                f"{len(free)} ranks: raise the limit (ulimit -n)"
            )
    return ""


def free_descriptors() -> int | None:
    """Return how many more file descriptors this process may open; None if not known."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        count = len(os.listdir("/proc/self/fd")) - 1  # the directory's own
    except OSError:
        return None
    return None if limit == resource.RLIM_INFINITY else max(limit - count, 0)


def host_id() -> str:
    """Return a text that is equal for processes of one host: ZSHARD_HOST if it is set."""
    named = os.environ.get("ZSHARD_HOST")
    if named:
        return named
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{socket.gethostname()}/{boot.read_text().strip()}"
    except OSError:  # some sandboxes hide it
        return f"{socket.gethostname()}/"
