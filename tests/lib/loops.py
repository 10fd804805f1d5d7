"""The loops of device.h through ctypes: their jobs as in C, and the CPU's on tensors."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


class Sum(ctypes.Structure):
    """zs_sum."""

    _fields_ = (
        ("src", ctypes.POINTER(ctypes.c_void_p)),
        ("world", ctypes.c_int),
        ("dst", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("dtype", ctypes.c_int),
        ("to", ctypes.c_int),
        ("scale", ctypes.c_double),
        ("accumulate", ctypes.c_bool),
        ("per_host", ctypes.c_int),
        ("tree", ctypes.c_void_p),
        ("squares", ctypes.c_void_p),
    )


class Cast(ctypes.Structure):
    """zs_cast."""

    _fields_ = (
        ("dst", ctypes.c_void_p),
        ("src", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("to", ctypes.c_int),
        ("from", ctypes.c_int),
    )


class Numbers(ctypes.Structure):
    """zs_numbers."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("dtype", ctypes.c_int),
    )


def numbers(x: Tensor) -> Numbers:
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
