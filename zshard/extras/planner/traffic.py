"""Bytes that a rank receives in a step: from ranks of its own host, and from other hosts.

A gather is NCCL's. In its ring each rank receives (1 - 1/n) of what is gathered
(github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md) from one neighbour. One of a host's ranks has its
neighbour on another host, and NCCL has rings in which these are different ranks, one for each
network adapter: on average 1 / per_host of a rank's bytes come from other hosts.

Gradients: each rank gets its shard from every other one (csrc/comm/gpu/gpu_round.c). Where codes
cross hosts, a host's ranks first get the shards of their counterparts and sum them; then each gets
one code of its shard from each other host (csrc/comm/gpu/gpu_coded.c).
"""

from __future__ import annotations

import math
from typing import NamedTuple

CODE_BYTES = 2
"""Of a float32 number that crosses hosts as bfloat16: see docs/launching.md."""


class Traffic(NamedTuple):
    """Bytes that a rank receives. host: from ranks of its own host. hosts: from other hosts."""

    host: float = 0.0
    hosts: float = 0.0

    def plus(self, other: Traffic, times: float = 1.0) -> Traffic:
        return Traffic(self.host + times * other.host, self.hosts + times * other.hosts)


def ring(size: float, ranks: int, per_host: int) -> Traffic:
    """Return what a gather brings. size: bytes that all ranks have together. ranks: neighbours."""
    received = size * (1 - 1 / ranks)
    hosts = received / per_host if ranks > per_host else 0.0
    return Traffic(received - hosts, hosts)


def swap(shard: float, ranks: int, per_host: int) -> Traffic:
    """Return what it brings to get one's shard of gradients, of that many bytes, from all ranks."""
    inside = min(ranks, per_host)
    return Traffic(shard * (inside - 1), shard * (ranks - inside))


def swap_by_host(shard: float, code: float, ranks: int, per_host: int) -> Traffic:
    """Return the same where hosts sum their ranks' gradients first. code: bytes of a shard's sum as
    it crosses hosts."""
    hosts = math.ceil(ranks / per_host)
    return Traffic(shard * (per_host - 1) * hosts, code * (hosts - 1))
