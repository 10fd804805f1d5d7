"""The transport of several hosts, in two levels: between the ranks of each host, and between hosts.

It needs hosts that are alike. Each must have the same number of ranks, neighbors in
rank order, that can connect over shm. Where they are not, all ranks learn the same reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from zshard import _core
from zshard.ranks.meeting import Refusal, meet
from zshard.ranks.objects import gather_objects
from zshard.ranks.subgroups import new_subgroup


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


def connect_hosts(group: Any, own: Any, hosts: Sequence[str], timeout: float) -> _core.Comm | str:
    """Return the transport in two levels, or why there is none. Collective.

    own: zshard's process group of the same ranks.
    """
    size = ranks_per_host(hosts)
    if len(set(hosts)) == 1:
        return "all ranks are on one host"
    if size == 0:
        return "the hosts must have the same number of ranks each, neighbors in rank order"
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    met = _meet_on_host(group, rank // size * size, size, timeout)
    reasons = gather_objects(met.reason if isinstance(met, Refusal) else "", group)
    for reason in filter(None, reasons):
        return f"the ranks of a host cannot connect over shm: {reason}"
    assert isinstance(met, _core.Comm)
    ranks = dist.get_process_group_ranks(group)[rank % size :: size]
    even, odd = (new_subgroup(ranks, "gloo").group_name for _ in range(2))
    return _core.Comm.hosts(own.group_name, even, odd, met, rank, world, timeout)


def _meet_on_host(group: Any, first: int, size: int, timeout: float) -> _core.Comm | Refusal:
    if size == 1:
        return _core.Comm.alone("cpu")
    ranks = dist.get_process_group_ranks(group)[first : first + size]
    return meet(new_subgroup(ranks, "gloo"), timeout)
