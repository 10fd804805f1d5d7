"""Durations: of kernels by roofline, of collectives by latency and bandwidth.

A matmul takes its flops at the part of the data sheet's speed that large ones reach, or its bytes
at the memory's, whichever is longer; its result is computed in tiles, in waves over the device's
multiprocessors, so a small one wastes a part of the last wave. Memory-bound kernels take their
bytes; torch.compile fuses them, so fewer bytes move.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zshard.extras.planner.gpus import Device, Network
from zshard.extras.planner.kernels import Kernel, Segment
from zshard.extras.planner.traffic import Traffic

TILE = (128, 256)
FUSED = 0.4
"""Part of the memory-bound kernels' bytes that is left with torch.compile."""

ATTENTION = {"flash": 1.0, "triton": 0.65}
"""Speed of an implementation of attention, relative to PyTorch's."""

LINK_PART, NIC_PART = 0.8, 0.85
"""Parts of the data sheets' bandwidths that collectives of large messages reach."""

START, HOP = 25e-6, 20e-6
"""Seconds before a collective's first byte: on one host, and for each further host."""


class Compute(NamedTuple):
    """A device and how it is used: see prediction.Way."""

    device: Device
    precision: str = "bf16"
    compiled: bool = False
    attention: str = "flash"

    def of_segments(self, segments: Sequence[Segment]) -> list[float]:
        """Return the seconds of each segment, whose kernels follow one another."""
        kernels = {id(segment.kernels): segment.kernels for segment in segments}
        seconds = {key: sum(map(self.of_kernel, each)) for key, each in kernels.items()}
        return [seconds[id(segment.kernels)] for segment in segments]

    def of_kernel(self, kernel: Kernel) -> float:
        """Return the seconds of one kernel."""
        device = self.device
        moving = kernel.bytes / (device.bandwidth * 1e12 * device.move)
        if kernel.kind == "move":
            return moving * FUSED if self.compiled else moving + device.launch
        speed = 1e12 * (device.tflops if kernel.dtype.itemsize == 2 else device.fp32)
        if kernel.kind == "attention":
            speed *= device.attention * ATTENTION[self.attention]
        elif self.precision == "fp8" and kernel.dtype != torch.float32:
            speed = 1e12 * device.fp8 * device.matmul8 * self._filled(kernel.shape)
        else:
            speed *= device.matmul * self._filled(kernel.shape)
        return max(kernel.flops / speed, moving) + device.launch

    def _filled(self, shape: tuple[int, ...]) -> float:
        """Return the part of the multiprocessors' time that a matmul's tiles fill."""
        n, m = sorted(shape[:2])
        tiles = math.ceil(n / TILE[0]) * math.ceil(m / TILE[1])
        waves = tiles / self.device.units
        edge = m * n / (tiles * TILE[0] * TILE[1])
        return edge * waves / math.ceil(waves)


def gather(network: Network, size: float, ranks: int) -> float:
    """Return the seconds of an all-gather or a reduce-scatter.

    size: bytes that all ranks have together. ranks: neighbours, over as few hosts as possible.
    """
    if ranks <= 1:
        return 0.0
    hosts = math.ceil(ranks / network.per_host)
    speed = network.link * 1e9 * LINK_PART
    if hosts > 1:
        speed = min(speed, network.nic * 1e9 / 8 * NIC_PART)
    return START + HOP * (hosts - 1) + size * (1 - 1 / ranks) / speed


def all_reduce(network: Network, size: float, hosts: int) -> float:
    """Return the seconds of an all-reduce of `size` bytes by one rank of each host, while all other
    ranks do the same with their parts."""
    if hosts <= 1:
        return 0.0
    speed = network.nic * 1e9 / 8 * NIC_PART / network.per_host
    return 2 * (START + HOP * (hosts - 1) + size * (1 - 1 / hosts) / speed)


def exchange(network: Network, traffic: Traffic, ranks: int) -> float:
    """Return the seconds in which each of these ranks receives that much from the others."""
    if ranks <= 1 or traffic == Traffic():
        return 0.0
    hosts = math.ceil(ranks / network.per_host)
    inside = traffic.host / (network.link * 1e9 * LINK_PART)
    between = traffic.hosts * network.per_host / (network.nic * 1e9 / 8 * NIC_PART)
    return START + HOP * (hosts - 1) + max(inside, between)
