"""libnccl: find it, configure it and shut it down.

Torch's CUDA wheels install NCCL as a package of its own (nvidia.nccl). torch has usually loaded it;
if not, that package has the path. Everything else is in C.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zshard import _core
from zshard._errors import check_choice
from zshard.ranks import meeting

MAX_CTAS = 64  # NCCL's own limit
POLICIES = ("default", "efficiency")  # by their numbers in the C core


@dataclass(frozen=True)
class NcclOptions:
    """NCCL settings for a model on GPUs: FSDP(model, transport=zshard.NcclOptions(...)).

    Pass the same settings on all ranks.

    Args:
        ctas: NCCL's CTA policy, that is, how many of a GPU's multiprocessors it may occupy.
            "default": NCCL's choice. "efficiency": few (needs NCCL 2.27).
        min_ctas, max_ctas: lower and upper limit for each NCCL kernel, 1 to 64. (A CTA is a thread
            block and occupies one multiprocessor.) Kernels of three streams run side by side, so
            max_ctas is at most a third of the multiprocessors, rounded down to a power of two (32
            of an H200's 132). None: NCCL's choice for min_ctas, that maximum for max_ctas.
        communicators: 2 overlaps parameter all-gathers with gradient reductions; 1 runs them one
            after the other and halves NCCL's own memory.
        any_order: ranks may run different units (branches that differ between ranks), or the same
            ones in another order. Their processes then agree before each transfer, which takes host
            time, so it is off by default.

    Raises ValueError for invalid values. FSDP(...) raises NotImplementedError, with the version, if
    the installed NCCL is too old; DivergenceError if ranks differ; ValueError for more CTAs than
    the GPUs have room for.
    """

    ctas: str = "default"
    min_ctas: int | None = None
    max_ctas: int | None = None
    communicators: int = 2
    any_order: bool = False

    def __post_init__(self) -> None:
        check_choice("NcclOptions: ctas", self.ctas, POLICIES)
        for name, values, expected in (
            ("min_ctas", (None, *range(1, MAX_CTAS + 1)), f"None or 1 to {MAX_CTAS}"),
            ("max_ctas", (None, *range(1, MAX_CTAS + 1)), f"None or 1 to {MAX_CTAS}"),
            ("communicators", (1, 2), "1 or 2"),
            ("any_order", (False, True), "True or False"),
        ):
            value = getattr(self, name)
            if not any(type(value) is type(each) and value == each for each in values):
                raise ValueError(f"NcclOptions: {name} must be {expected}, got {value!r}")
        if (self.min_ctas or 0) > (self.max_ctas or MAX_CTAS):
            raise ValueError(f"NcclOptions: min_ctas exceeds max_ctas, got {self!r}")

    def _numbers(self) -> tuple[int, int, int, int, bool]:
        """Return the arguments for zshard._core.Comm.gpu."""
        policy = POLICIES.index(self.ctas)
        least, most = self.min_ctas or 0, self.max_ctas or 0
        return policy, least, most, self.communicators, self.any_order


@functools.cache
def library() -> tuple[str, str]:
    """Return NCCL's version ("2.28.9") and file; loads the library on first use.

    Searched in this order: ZSHARD_NCCL_LIB (a path), the library that torch has loaded, that of the
    Python package nvidia.nccl, the system's. Raises NotImplementedError if there is none, or if it
    is older than 2.14.
    """
    version_and_file = _core.nccl_library(_packaged())
    # Never in a destructor: NCCL's own dependencies may be unloaded by then.
    atexit.register(_core.nccl_abort, "the Python interpreter is exiting")
    return version_and_file


def _packaged() -> str | None:
    """Return the library of the Python package nvidia.nccl, or None."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # no nvidia package at all
        return None
    folders = spec.submodule_search_locations if spec is not None else None
    files = (Path(folder) / "lib" / "libnccl.so.2" for folder in folders or ())
    return next((str(file) for file in files if file.exists()), None)


def gpu_id(device: str) -> bytes:
    """Return a digest of this GPU's host and its place there, which NCCL uses to distinguish GPUs.
    It does not depend on the index in this process, and two MIG instances of a GPU have the same
    digest."""
    facts: Any = torch.cuda.get_device_properties(device)
    place = f"{facts.pci_domain_id}:{facts.pci_bus_id}:{facts.pci_device_id}"
    return hashlib.sha256(f"{meeting.host_id()} {place}".encode()).digest()


def sharing_a_gpu(control: _core.Comm, device: str) -> tuple[int, int] | None:
    """Return the first two ranks that share a GPU, which NCCL rejects; None if each has its own.
    Collective."""
    ids = control.exchange(gpu_id(device))
    return next(((ids.index(gpu), r) for r, gpu in enumerate(ids) if ids.index(gpu) < r), None)
