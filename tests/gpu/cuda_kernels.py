"""cuda_kernels.h for tests: its functions on tensors, launched by the fake or by the real driver.

Tests have tensors on the host and compare with the CPU. Where the kernels run elsewhere
(ZSHARD_TEST_KERNELS=gpu: nvcc's kernels on a GPU; =copies: the fake, to test this), their arguments
are copied there and back.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from c_compile import BUILDS, ROOT, C, compile_c
from c_sources import source, sources
from loops import (
    DTYPES,
    INT,
    B,
    Cast,
    D,
    F,
    N,
    Numbers,
    P,
    Sum,
    U,
    numbers,
    source_dtype,
    structure,
)
from torch import Tensor

import zshard

SOURCES = ["cuda_driver.c", "cuda_kernels.c", "cuda_update.c", "device_cpu.c"]
SOURCES += ["optim_compact.c", "optim_lanes.c", "optim_cpu.c", "simd.c", "memory.c", "status.c"]
KERNELS = os.environ.get("ZSHARD_TEST_KERNELS", "")  # "", "copies" or "gpu"
ADAM, SGD = 0, 1
LENGTHS = [0, 1, 7, 8, 9, 40, 1027, 4099]
"""Of the arrays that a test computes with."""


_rates = dict.fromkeys(("lr", "weight_decay", "beta1", "beta2", "eps", "momentum", "dampening"), D)
_flags = dict.fromkeys(("decoupled", "amsgrad", "nesterov", "maximize", "dithered"), B)
Hyper = structure("zs_hyper", **_rates, **_flags, seed=U, round=U)
_element = {"numel": N, "number": U, "dtype": INT, "dithered": B, "device": P}
Run = structure("zs_run", param=P, grad=P, factor=F, state=P * 6, form=INT, constants=P, **_element)
_runs = {"runs": ctypes.POINTER(Run), "n_runs": N}
_scalars = {"grad_factor": P, "found_inf": P}
Update = structure("zs_cuda_update_job", rule=INT, full=B, **_runs, **_scalars, live=B)
Live = structure("zs_live", lr=P, lr_dtype=INT, **_scalars, room=P)
Norm = structure("zs_cuda_norm_job", x=Numbers, p=D, result=P, scratch=P)


NORM_SCRATCH = (1 << 17) + (1 << 11) + (1 << 5)


Address = Callable[[Tensor | None], int | None]


def pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


@contextlib.contextmanager
def places(*tensors: Tensor | None) -> Iterator[Address]:
    """Make these tensors accessible to kernels: directly, or as copies that are copied back at the
    end.

    Copies cover entire storages, at the same offset within 64 bytes, so arrays have the same
    alignment there, and out-of-bounds writes are noticed.
    """
    if not KERNELS:
        yield pointer
        return
    device = "cuda" if KERNELS == "gpu" else "cpu"
    copies: dict[int, tuple[Tensor, Tensor]] = {}
    for storage in (t.untyped_storage() for t in tensors if t is not None):
        begin = storage.data_ptr()
        if begin not in copies:
            here = torch.empty(0, dtype=torch.uint8).set_(storage)
            room = torch.empty(here.numel() + 64, dtype=torch.uint8, device=device)
            skip = (begin - room.data_ptr()) % 64
            there = room[skip : skip + here.numel()]
            there.copy_(here)
            copies[begin] = here, there
    if KERNELS == "gpu":
        torch.cuda.synchronize()  # side streams do not wait for torch's

    def address(x: Tensor | None) -> int | None:
        if x is None:
            return None
        begin = x.untyped_storage().data_ptr()
        return x.data_ptr() - begin + copies[begin][1].data_ptr()

    try:
        yield address
    finally:
        for here, there in copies.values():
            here.copy_(there)


def numbers_at(at: Address, x: Tensor) -> Any:
    found = numbers(x)
    found.data = at(x)
    return found


CALLS: dict[str, list[Any]] = {  # of cuda_kernels.h, without the stream at the end
    "sum": [P],
    "cast": [P, B],
    "scale": [P, D, P],
    "norm": [P],
    "norm_join": [P, N, D, P],
    "differs": [P, P, ctypes.c_size_t, P],
    "encode": [P, P, N, P],
    "update": [P],
}


class Cuda:
    """cuda_kernels.h on tensors, in the default stream or a side stream."""

    def __init__(self, path: Path) -> None:
        self.lib = ctypes.CDLL(str(path))
        self.lib.zs_last_message.restype = ctypes.c_char_p
        self.lib.zs_face_run.restype = ctypes.POINTER(Run)
        self.lib.zs_face_update.restype = ctypes.POINTER(Update)
        for name, kinds in CALLS.items():
            getattr(self.lib, f"zs_cuda_{name}").argtypes = [*kinds, P]
        self.stream: int | None = None
        self.ok(self.lib.zs_cuda_enter(0))

    def ok(self, status: int) -> None:
        message = self.lib.zs_last_message().decode()
        self.lib.zs_clear_error()
        assert status == 0, message

    def finish(self, status: int) -> None:
        self.ok(status)
        self.ok(self.lib.zs_face_wait(ctypes.c_void_p(self.stream)))

    def call(self, name: str, *arguments: Any) -> None:
        """Make one of CALLS; a structure is passed by its address."""
        by_address = [
            ctypes.byref(each) if isinstance(each, ctypes.Structure) else each for each in arguments
        ]
        self.finish(getattr(self.lib, f"zs_cuda_{name}")(*by_address, self.stream))

    def sum(self, sources: Sequence[Tensor | None], dst: Tensor, scale: float, add: bool) -> None:
        dtypes = DTYPES[source_dtype(sources, dst)], DTYPES[dst.dtype]
        with places(*sources, dst) as at:
            array = (ctypes.c_void_p * len(sources))(*map(at, sources))
            self.call("sum", Sum(array, len(sources), at(dst), dst.numel(), *dtypes, scale, add))

    def cast(self, dst: Tensor, src: Tensor, add: bool = False) -> None:
        dtypes = DTYPES[dst.dtype], DTYPES[src.dtype]
        with places(dst, src) as at:
            self.call("cast", Cast(at(dst), at(src), src.numel(), *dtypes), add)

    def scale(self, x: Tensor, factor: float, device_factor: Tensor | None = None) -> None:
        with places(x, device_factor) as at:
            self.call("scale", numbers_at(at, x), factor, at(device_factor))

    def norm(self, x: Tensor, p: float) -> float:
        result, scratch = torch.full((1,), 7.0).double(), torch.empty(NORM_SCRATCH).double()
        scratch.fill_(math.nan)
        with places(x, result, scratch) as at:
            self.call("norm", Norm(numbers_at(at, x), p, at(result), at(scratch)))
        return float(result)

    def norm_join(self, values: Tensor, p: float) -> float:
        result = torch.full((1,), 7.0).double()
        with places(values, result) as at:
            self.call("norm_join", at(values), values.numel(), p, at(result))
        return float(result)

    def differs(self, a: Tensor, b: Tensor) -> int:
        flag = torch.zeros(1, dtype=torch.int32)
        with places(a, b, flag) as at:
            self.call("differs", at(a), at(b), a.numel(), at(flag))
        return int(flag)

    def encode(self, values: Tensor, lost: Tensor, codes: Tensor) -> None:
        with places(values, lost, codes) as at:
            self.call("encode", at(values), at(lost), values.numel(), at(codes))


def image_flags() -> list[str]:
    """Return the flags that make cuda_image.c include the kernels that setup.py compiled with
    nvcc."""
    if KERNELS != "gpu":
        return []
    facts = zshard._core.machine()
    assert facts["built"], "this build of zshard has no kernels"
    fatbin = ROOT / "build" / "cuda" / "kernels.fatbin"
    words = {"FATBIN": f'"{fatbin}"', "TARGETS": f'"{facts["targets"]}"', "VERSION": facts["built"]}
    return [f"-DZS_CUDA_{name}={value}" for name, value in words.items()]


def compile_kernels(target: Path) -> Path:
    """Return the library with cuda_kernels.h and the CPU's loops."""
    files = sources(*SOURCES)
    files += [source("cuda_image.c") if KERNELS == "gpu" else C / "fake_image.c"]
    files += [C / name for name in ("cuda_face.c", "serial_parallel_for.c")]
    flags = [*BUILDS["plain"], *image_flags()]
    return compile_c(target, files, flags, ("-shared", "-ldl", "-lm"))


# --- numbers to compute with -----------------------------------------------------------------------

SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -6e-8, 65519.9, 65520.0, 3e38, 1e-40]
PADDING = 32  # elements around an array


class Place:
    """An array `offset` elements into a larger one that is aligned, and whether that stayed."""

    def __init__(self, values: Tensor, offset: int) -> None:
        n = values.numel()
        whole = torch.full((n + 2 * PADDING + 64,), 3.0, dtype=values.dtype)
        skip = -whole.data_ptr() % 64 // whole.element_size()
        self.whole, self.begin, self.end = whole, skip + offset, skip + offset + n
        self.values = whole[self.begin : self.end]
        self.values.copy_(values)

    def untouched_around(self) -> bool:
        return bool((self.whole[: self.begin] == 3).all() and (self.whole[self.end :] == 3).all())


def some(n: int, dtype: torch.dtype, seed: int, special: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, generator=generator, dtype=torch.float64)
    values *= 10 ** torch.randint(-4, 4, (n,), generator=generator).double()
    if special and n >= len(SPECIAL):
        where = torch.randperm(n, generator=generator)[: len(SPECIAL)]
        values[where] = torch.tensor(SPECIAL, dtype=torch.float64)
    return values.to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality, but a NaN is a NaN: its other bits differ from machine to machine."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    nan = a.isnan() & b.isnan()
    return bool(((a.view(integer) == b.view(integer)) | nan).all())
