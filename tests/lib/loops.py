"""The loops of device.h through ctypes: their jobs as in C, and the CPU's on tensors."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


P, N, INT, B = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_bool
F, D, U = ctypes.c_float, ctypes.c_double, ctypes.c_uint64


def structure(name: str, **fields: Any) -> Any:
    """Return a structure of C, by its name there and its fields in order."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


_ways = {"scale": D, "accumulate": B, "per_host": INT, "tree": P, "squares": P}
Sum = structure(
    "zs_sum", src=ctypes.POINTER(P), world=INT, dst=P, numel=N, dtype=INT, to=INT, **_ways
)
Cast = structure("zs_cast", dst=P, src=P, numel=N, to=INT, **{"from": INT})
Numbers = structure("zs_numbers", data=P, numel=N, dtype=INT)


def numbers(x: Tensor) -> Any:
    return Numbers(x.data_ptr(), x.numel(), DTYPES[x.dtype])


class Device:
    """The CPU's loops of device.h, on tensors; in a library under names with this prefix."""

    def __init__(self, library: Path, prefix: str = "zs_cpu_") -> None:
        loops = ctypes.CDLL(str(library))
        names = ("sum", "cast", "scale", "norm")
        self._sum, self._cast, self._scale, self._norm = (loops[prefix + name] for name in names)
        self._norm.restype = ctypes.c_double

    def sum(
        self,
        sources: Sequence[Tensor | None],
        dst: Tensor,
        scale: float,
        add: bool,
        per_host: int = 0,
    ) -> None:
        pointers = [None if s is None else s.data_ptr() for s in sources]
        array = (ctypes.c_void_p * len(pointers))(*pointers)
        dtypes = DTYPES[source_dtype(sources, dst)], DTYPES[dst.dtype]
        job = Sum(array, len(pointers), dst.data_ptr(), dst.numel(), *dtypes, scale, add, per_host)
        self._sum(ctypes.byref(job))

    def cast(self, dst: Tensor, src: Tensor) -> None:
        dtypes = DTYPES[dst.dtype], DTYPES[src.dtype]
        job = Cast(dst.data_ptr(), src.data_ptr(), src.numel(), *dtypes)
        self._cast(ctypes.byref(job))

    def norm(self, x: Tensor, p: float) -> float:
        return float(self._norm(ctypes.byref(numbers(x)), ctypes.c_double(p)))

    def scale(self, x: Tensor, factor: float) -> None:
        self._scale(ctypes.byref(numbers(x)), ctypes.c_double(factor))


def source_dtype(sources: Sequence[Tensor | None], dst: Tensor) -> torch.dtype:
    return next((s.dtype for s in sources if s is not None), dst.dtype)
