"""Has zshard take models on the CPU for models on a GPU, where ZSHARD_CUDA_ON_HOST=1 says so.

The one idea: zshard asks two functions of its own which device a model on the CPU is for, and how
ranks with a device are to talk; here they are replaced. The environment is read when they are
called, so a process may be told after it has begun.
"""

from __future__ import annotations

import os
from typing import Any

from zshard import NcclOptions
from zshard._ranks import devices, transports

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


def install() -> None:
    """Replaces them in this process; a second time changes nothing."""
    devices.device_of_cpu = _device_of_cpu
    transports.choices_for = _choices
