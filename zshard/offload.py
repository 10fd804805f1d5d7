"""Offload: keep parts of a model out of the memory of the device that computes.

One small record states what to offload (parameters, gradients, optimizer state), how much (a
fraction of the model) and where to: the memory of a GPU's host, or files in a directory, for
example on an NVMe disk. On CPU ranks everything is in host memory anyway, so only a directory has
an effect.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

from zshard.ranks.devices import CPU


@dataclass(frozen=True)
class Offload:
    """Chooses what to offload, and where to: FSDP(model, offload=zshard.Offload(...)).

    Args:
        params: offload parameters: this rank's shards and their low-precision copies.
        grads: offload this rank's reduced gradients.
        optimizer: offload the state of zshard's optimizers.
        fraction: fraction of the model's bytes to offload, 0 to 1. Entire units are chosen, evenly
            over the model.
        directory: directory for this rank's files. They are unnamed and vanish with the process.
            Ranks that share memory (shm) need a directory that all of them see. None: the memory
            of the GPU's host, pinned and mapped; on CPU ranks, no effect.
        cache: bytes per rank of offloaded data that may stay in memory while not in use; half of it
            is for prefetching. Allow about three shards of the largest unit, or computation waits
            for the disk. Applies to the whole process: the last value set counts.

    Files are memory-mapped, so parameters and state can be read and written like any other tensor.
    Steps of zshard's optimizers use direct I/O where the file system supports it, unless
    ZSHARD_OFFLOAD_DIRECT=0 is set. Results are bit-identical to those in memory.

    Raises ValueError for a fraction or cache out of range, TypeError for an invalid directory.
    FSDP(...) raises NotImplementedError for a directory with a model on a GPU.
    """

    params: bool = True
    grads: bool = False
    optimizer: bool = True
    fraction: float = 1.0
    directory: str | os.PathLike[str] | None = None
    cache: int = 256 << 20

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"Offload: fraction must be between 0 and 1, got {self.fraction!r}")
        if isinstance(self.cache, bool) or not isinstance(self.cache, int) or self.cache < 0:
            raise ValueError(f"Offload: cache must be a number of bytes, got {self.cache!r}")
        if self.directory is not None and not isinstance(self.directory, str | os.PathLike):
            raise TypeError(f"Offload: directory must be a path, got {self.directory!r}")

    @property
    def what(self) -> tuple[bool, bool, bool, float]:
        """Return the arguments of Engine.set_offload, without the directory."""
        return self.params, self.grads, self.optimizer, self.fraction

    @property
    def moves(self) -> bool:
        """Return whether anything is offloaded."""
        return (self.params or self.grads or self.optimizer) and self.fraction > 0

    @property
    def to_disk(self) -> bool:
        """Return whether anything is offloaded to disk."""
        return self.directory is not None and self.moves

    def spelled(self) -> str:
        """Return the value of offload= as a script would write it."""
        values = ((field, getattr(self, field.name)) for field in fields(self))
        words = [f"{field.name}={value!r}" for field, value in values if value != field.default]
        return f"Offload({', '.join(words)})"

    @staticmethod
    def of(value: object, argument: str = "offload") -> Offload | None:
        """Return the Offload that an argument means: an Offload, a directory, a bool, or a
        CPUOffload or an offload policy, zshard's or torch's. None: everything stays in memory.
        Raises TypeError for anything else."""
        if value is None or isinstance(value, Offload):
            return value
        if isinstance(value, str | os.PathLike):
            return Offload(directory=value)
        if isinstance(value, bool):
            return Offload() if value else None
        kinds = {cls.__name__ for cls in type(value).__mro__}
        if "CPUOffload" in kinds:
            moves = bool(getattr(value, "offload_params", False))
        elif "OffloadPolicy" in kinds:
            moves = "CPUOffloadPolicy" in kinds
        else:
            raise TypeError(
                f"{argument} must be an Offload, a directory, a bool, or torch's CPUOffload or "
                f"OffloadPolicy, got {value!r}"
            )
        return Offload(grads=True) if moves else None

    def on(self, device: str) -> Offload | None:
        """Return what it means on that device; None: nothing is offloaded. Raises
        NotImplementedError for a directory and a GPU."""
        if not self.moves or (device == CPU and not self.to_disk):
            return None
        if device != CPU and self.to_disk:
            raise NotImplementedError(
                "Offload(directory=...) is not supported for models on a GPU: omit directory"
            )
        return self


# --- torch's classes, which FSDP() also accepts ---------------------------------------------------


@dataclass
class CPUOffload:
    """FSDP1's FSDP(cpu_offload=CPUOffload(offload_params=True)): parameters and gradients stay in
    host memory. No effect on CPU ranks."""

    offload_params: bool = False


@dataclass
class OffloadPolicy:
    """FSDP2's policy for no offloading: parameters stay on their device."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """FSDP2's policy for offloading parameters, gradients and optimizer state to host memory.

    pin_memory: accepted for compatibility; no effect. On CPU ranks the policy has no effect.
    """

    pin_memory: bool = True
