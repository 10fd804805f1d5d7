"""The optimizer's step of a rank: what it reads and writes, over which links.

A step is bound by memory: it reads and writes parameters and state, and reads gradients twice (once
for their norm). Offloaded parts cross the link to the host's memory, both ways at the same time:
zshard's step runs on the GPU also for them (docs/design/gpu.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zshard.extras.planner.gpus import Device


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
