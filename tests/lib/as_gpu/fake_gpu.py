"""Has zshard take models on the CPU for models on a GPU, where ZSHARD_CUDA_ON_HOST=1 says so.

zshard asks three functions of its own which device a model on the CPU is for, which
GPU that is, and how ranks with a device are to talk; here they are replaced. The environment is read when they are
called, so a process may be told after it has begun.
"""

from __future__ import annotations

import os
from typing import Any

from zshard import NcclOptions
from zshard.ranks import devices, transports

GPU = "cuda:0/host"
"""A GPU whose memory is the host's, as the core calls it."""


def wanted() -> bool:
    """Is this process to use a fake GPU?"""
    return os.environ.get("ZSHARD_CUDA_ON_HOST") == "1"


def _device_of_cpu() -> str:
    return GPU if wanted() else devices.CPU


def _choices(device: str, asked: Any) -> tuple[Any, Any]:
    """A transport's name says how the hosts talk; ZSHARD_BACKEND, what moves the GPU's memory."""
    if device != GPU:
        return "auto", asked
    hosts = "auto" if isinstance(asked, NcclOptions) else asked
    return hosts, os.environ.get("ZSHARD_BACKEND", "c10d")


_real_gpu_id = transports._gpu_id


def _gpu_id(device: str) -> bytes:
    """The stand-ins' own number of this GPU; by default each rank has another."""
    if device != GPU:
        return _real_gpu_id(device)
    first = os.environ.get("FAKE_CUDA_VISIBLE", f"of rank {os.environ.get('RANK')}").split(",")[0]
    return first.encode().ljust(32)


def install() -> None:
    """Replaces them in this process; a second time changes nothing."""
    transports._gpu_id = _gpu_id
    devices.device_of_cpu = _device_of_cpu
    transports.choices_for = _choices
