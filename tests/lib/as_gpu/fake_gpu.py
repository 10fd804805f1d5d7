"""Make zshard treat models on the CPU as models on a GPU if ZSHARD_CUDA_ON_HOST=1.

zshard calls three of its functions for the device of a model on the CPU, the GPU's identity,
and the transport for a device; this file replaces them. They read the environment when they are
called, so a process may set it after it has started.
"""

from __future__ import annotations

import os
from typing import Any

from zshard import NcclOptions
from zshard.ranks import devices, nccl, transports

GPU = "cuda:0/host"
"""A GPU whose memory is the host's, as the core calls it."""


def wanted() -> bool:
    """Return whether this process should use a fake GPU."""
    return os.environ.get("ZSHARD_CUDA_ON_HOST") == "1"


def _device_of_cpu() -> str:
    return GPU if wanted() else devices.CPU


def _choices(device: str, asked: Any) -> tuple[Any, Any]:
    """A transport's name selects the transport between hosts; ZSHARD_BACKEND, the one for GPU
    memory."""
    if device != GPU:
        return "auto", asked
    hosts = "auto" if isinstance(asked, NcclOptions) else asked
    return hosts, os.environ.get("ZSHARD_BACKEND", "c10d")


_real_gpu_id = nccl.gpu_id


def _gpu_id(device: str) -> bytes:
    """Return the fakes' own number of this GPU; by default each rank has another."""
    if device != GPU:
        return _real_gpu_id(device)
    first = os.environ.get("FAKE_CUDA_VISIBLE", f"of rank {os.environ.get('RANK')}").split(",")[0]
    return first.encode().ljust(32)


def install() -> None:
    """Replace them in this process. Idempotent."""
    nccl.gpu_id = _gpu_id
    devices.device_of_cpu = _device_of_cpu
    transports.choices_for = _choices
