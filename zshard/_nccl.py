"""libnccl: where it lies, which one it is, how it is to be used, and its end.

The one idea: torch's wheels with CUDA bring NCCL as a package of its own (nvidia.nccl). torch has
usually loaded it; where it has not, this package says where the file is. All else is in C.
"""

from __future__ import annotations

import atexit
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from zshard import _core

MAX_CTAS = 64  # NCCL's own limit
POLICIES = ("default", "efficiency", "zero")  # by their numbers in the C core


@dataclass(frozen=True)
class NcclOptions:
    """How NCCL is to be used for a model on GPUs: FSDP(model, transport=zshard.NcclOptions(...)).

    ctas: what NCCL may take of a GPU's multiprocessors. "default": as it likes; "efficiency": few
        (NCCL 2.27); "zero": none where the GPU's copy engines can do it (NCCL 2.28): gathers within
        a host, of memory in windows; the rest is as by default.
    min_ctas, max_ctas: limits for each kernel of NCCL's (a CTA is a thread block, and takes a
        multiprocessor); None: NCCL's choice. Kernels in three streams have to find room side by
        side, so a third of the multiprocessors, rounded down to a power of two (32 of an H200's
        132), is the most, and is what None means for max_ctas.
    windows: shards, full parameters, buckets and what is received lie in memory that is registered
        with NCCL (2.27), which then needs no copies between in a gather (but not what zero1 and
        hybrid_full keep). That memory is NCCL's, not of torch's allocator; it goes in steps of
        2 MiB, which memory() does not count, and is kept for other models as long as the process
        group is.
    communicators: 2: parameters are gathered while gradients are exchanged; 1: one after the other,
        which takes half of the memory that NCCL has for itself.

    Equal on all ranks. Raises ValueError for what is no option; FSDP raises NotImplementedError
    where the NCCL that is here is too old, with its version, DivergenceError where ranks differ,
    and ValueError for more CTAs than the GPUs have room for.
    """

    ctas: str = "default"
    min_ctas: int | None = None
    max_ctas: int | None = None
    windows: bool = False
    communicators: int = 2

    def __post_init__(self) -> None:
        if self.ctas not in POLICIES:
            known = ", ".join(repr(each) for each in POLICIES)
            raise ValueError(f"NcclOptions(ctas={self.ctas!r}): there are {known}")
        for name in ("min_ctas", "max_ctas"):
            value = getattr(self, name)
            if value is not None and not _is_count(value, MAX_CTAS):
                raise ValueError(f"NcclOptions({name}={value!r}): None or 1 to {MAX_CTAS}")
        if (
            self.min_ctas is not None
            and self.max_ctas is not None
            and self.min_ctas > self.max_ctas
        ):
            raise ValueError(
                f"NcclOptions: min_ctas={self.min_ctas} is above max_ctas={self.max_ctas}"
            )
        if not isinstance(self.windows, bool):
            raise ValueError(f"NcclOptions(windows={self.windows!r}): True or False")
        if not _is_count(self.communicators, 2):
            raise ValueError(f"NcclOptions(communicators={self.communicators!r}): there are 1 or 2")

    def _numbers(self) -> tuple[int, int, int, int, int]:
        """As zshard._core.Comm.gpu takes them."""
        policy = POLICIES.index(self.ctas)
        least, most = self.min_ctas or 0, self.max_ctas or 0
        return policy, least, most, int(self.windows), self.communicators


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


_known: tuple[str, str] | None = None


def library() -> tuple[str, str]:
    """NCCL's version ("2.28.9") and file; opens the library on first use.

    ZSHARD_NCCL_LIB (a path) goes before the one that torch has loaded, that before the one of
    Python's nvidia.nccl package, and the system's comes last. Raises NotImplementedError where
    there is none, or one that is too old (before 2.14).
    """
    global _known
    if _known is None:
        _known = _core.nccl_library(_packaged())
        # Never from a destructor: what NCCL itself needs may be gone by then.
        atexit.register(_core.nccl_abort, "the interpreter has ended")
    return _known


def _packaged() -> str | None:
    """The file of Python's nvidia.nccl package."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # no nvidia at all
        return None
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        file = Path(folder) / "lib" / "libnccl.so.2"
        if file.exists():
            return str(file)
    return None
