"""The optimizer's step of a rank: what it reads and writes, over which links, and Muon's matrices.

A step is bound by memory: it reads and writes parameters and state, and reads gradients twice (once
for their norm). Offloaded parts cross the link to the host's memory, both ways at the same time:
zshard's step runs on the GPU also for them (docs/design/gpu.md).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from zshard.extras.optimizers.matrices import hidden_matrices
from zshard.extras.planner.durations import Compute
from zshard.extras.planner.gpus import Device
from zshard.extras.planner.kernels import Kernel
from zshard.extras.planner.traffic import Traffic

NEWTON_SCHULZ = 5
"""Iterations of Muon for each matrix, by default."""


class Held(NamedTuple):
    """A rank's part of a unit, in bytes. trained: of trained parameters, in their own dtype. cast,
    copy: what the cast to the compute dtype reads and writes. offloads: parameters, gradients."""

    trained: int
    cast: int
    copy: int
    offloads: tuple[bool, bool]


def update_seconds(parts: Sequence[Held], state: int, offloaded: int, device: Device) -> float:
    """Return the seconds of a step. state: bytes of the optimizer's; offloaded: of these."""
    moved = 2 * state + sum(4 * each.trained + each.copy for each in parts)
    reads = writes = offloaded
    for each in parts:
        params, grads = each.offloads
        reads += params * (each.trained + each.cast) + grads * 2 * each.trained
        writes += params * (each.trained + each.copy)
    in_memory = moved / (device.bandwidth * 1e12 * device.move)
    return max(in_memory, max(reads, writes) / (device.host * 1e9))


def matrices_of(model: nn.Module) -> list[tuple[int, int]]:
    """Return the shapes of the trained matrices that Muon(model) orthogonalizes."""
    hidden = hidden_matrices(model)
    return [
        (param.shape[0], param.numel() // param.shape[0])
        for param in model.parameters()
        if id(param) in hidden and param.requires_grad
    ]


def orthogonalize_seconds(shapes: Iterable[tuple[int, int]], ranks: int, compute: Compute) -> float:
    """Return the seconds of Newton-Schulz iterations in bfloat16: each matrix on one rank, and all
    ranks for about as long."""

    def product(m: int, n: int, k: int) -> float:
        size = 2 * (m * n + m * k + n * k)
        return compute.of_kernel(Kernel("matmul", 2.0 * m * n * k, size, torch.bfloat16, (m, n, k)))

    @functools.cache
    def cost(n: int, m: int) -> float:
        return NEWTON_SCHULZ * (product(n, n, m) + product(n, n, n) + product(n, m, n))

    costs = [cost(*sorted(shape)) for shape in shapes]
    return max(sum(costs) / ranks, max(costs, default=0.0))


def orthogonalize_traffic(
    shapes: Iterable[tuple[int, int]], ranks: int, shards: int, per_host: int
) -> Traffic:
    """Return what a rank receives for them: elements of the matrices that it owns, from the ranks
    with the other shards, and its own part of the results, in bfloat16."""
    numel = sum(n * m for n, m in shapes)
    size = 2 * (numel / ranks * (1 - 1 / shards) + numel / shards * (1 - 1 / ranks))
    inside = (min(ranks, per_host) - 1) / max(1, ranks - 1)
    return Traffic(size * inside, size * (1 - inside))
