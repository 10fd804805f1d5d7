"""Offload: which parts of a model are kept elsewhere than in the memory that computes with them.

The one idea: one small record says what (parameters, gradients, optimizer state), how much (a
fraction of the model) and where to: the memory of a GPU's host, or files in a directory, say on an
NVMe disk. On CPU ranks host memory is where everything is, so only a directory changes anything.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from zshard import _core
from zshard._device import CPU

__all__ = [
    "CPUOffloadPolicy",
    "Offload",
    "OffloadPolicy",
    "is_policy",
    "parse_offload",
    "set_offload",
]


@dataclass(frozen=True)
class Offload:
    """What of a model is offloaded, and where to.

    params, grads, optimizer: parameters (this rank's shards, and their low-precision copies),
        gradients (this rank's reduced ones), the state of zshard's optimizers.
    fraction: of the model's bytes, between 0 and 1: whole units are chosen, evenly over the model.
    directory: files for this rank are made there; they have no names and are gone with the process.
        For ranks that share memory (shm) it has to be one that all of them see. None: the memory of
        a GPU's host, in pages that the GPU reads and writes where they lie: tensors there are CUDA
        tensors as others, and the optimizer's step streams them through the GPU. On CPU ranks that
        is where everything is anyway.
    cache: bytes per rank that may be in memory of what is on the disk and not in use at the moment;
        half of it is for what is fetched ahead. At least some three of the largest units' shards,
        or else the disk is waited for. The latest value set holds for all models of the process.

    Memory on disk is mapped: a parameter or state tensor can be read and written as any other.
    Steps of zshard's optimizers go past the page cache, through buffers that count within `cache`,
    unless ZSHARD_OFFLOAD_DIRECT=0 is set when the model is wrapped, or the file system has no
    direct I/O.
    Results are those of the same model in memory, to the bit.
    """

    params: bool = True
    grads: bool = False
    optimizer: bool = True
    fraction: float = 1.0
    directory: str | os.PathLike[str] | None = None
    cache: int = 256 << 20

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"Offload(fraction=...) is between 0 and 1, not {self.fraction!r}")
        if isinstance(self.cache, bool) or not isinstance(self.cache, int) or self.cache < 0:
            raise ValueError(f"Offload(cache=...) is a number of bytes, not {self.cache!r}")
        if self.directory is not None and not isinstance(self.directory, str | os.PathLike):
            raise TypeError(f"Offload(directory=...) is a path, not {self.directory!r}")

    @property
    def what(self) -> tuple[bool, bool, bool, float]:
        """Engine.set_offload's arguments but for the directory."""
        return self.params, self.grads, self.optimizer, self.fraction

    @property
    def moves(self) -> bool:
        """Does it ask for anything?"""
        return (self.params or self.grads or self.optimizer) and self.fraction > 0

    @property
    def to_disk(self) -> bool:
        """Does anything go to a disk?"""
        return self.directory is not None and self.moves


@dataclass
class OffloadPolicy:
    """FSDP2's: parameters stay on their device."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """FSDP2's: shards live in the CPU's memory. pin_memory: in pages that a device can read."""

    pin_memory: bool = True


def is_policy(given: Any) -> bool:
    """Is this one of the two, zshard's or torch's?"""
    return any(cls.__name__ == "OffloadPolicy" for cls in type(given).__mro__)


def parse_offload(offload: Any, cpu_offload: Any = None) -> Offload | None:
    """FSDP's two arguments. None: everything stays in memory.

    offload: an Offload, or a directory for one. cpu_offload: FSDP1's, a bool or an object with
    offload_params; or FSDP2's policies. Raises ValueError where both are given, TypeError for
    anything else.
    """
    cpu = _parse_cpu_offload(cpu_offload)
    if offload is not None and cpu is not None:
        raise ValueError("give offload or cpu_offload, not both")
    if isinstance(offload, str | os.PathLike):
        offload = Offload(directory=offload)
    if offload is not None and not isinstance(offload, Offload):
        raise TypeError(f"offload is a zshard.Offload or a directory, not {offload!r}")
    return offload or cpu


def _parse_cpu_offload(given: Any) -> Offload | None:
    if given is None or given is False:
        return None
    if given is True:
        return Offload()
    if isinstance(given, Offload):
        return given
    params = getattr(given, "offload_params", None)
    if isinstance(params, bool):  # FSDP1's CPUOffload
        return Offload(grads=True) if params else None
    if is_policy(given):
        to_cpu = any(cls.__name__ == "CPUOffloadPolicy" for cls in type(given).__mro__)
        return Offload(grads=True) if to_cpu else None
    raise TypeError(
        "cpu_offload is True, False, torch's CPUOffload or CPUOffloadPolicy, or a zshard.Offload, "
        f"not {given!r}"
    )


def offload_on(offload: Offload | None, device: str) -> Offload | None:
    """What `offload` means on that device; None: nothing lies elsewhere.

    Raises NotImplementedError for files and a GPU.
    """
    if offload is None or not offload.moves or (device == CPU and not offload.to_disk):
        return None
    if device != CPU and offload.to_disk:
        raise NotImplementedError(
            "Offload(directory=...) is for models on the CPU; on a GPU leave the directory out: "
            "what is offloaded then lies in the memory of the GPU's host"
        )
    return offload


def set_offload(engine: _core.Engine, offload: Offload | None) -> None:
    """Has the units that `engine` will get lie where `offload` says. Collective if that is a disk;
    OSError, on all ranks, where no file can be made."""
    if offload is None:
        return
    engine.set_offload(os.fspath(offload.directory or ""), *offload.what)
    if offload.to_disk:
        _core.set_pager_limit(offload.cache)
