"""The kernels of wire codes against the CPU's code (comm/wire_code.c), bit for bit; on any machine.

They run as test_cuda_kernels.py says.
"""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from cuda_kernels import SPECIAL, Cuda, same_bits, some
from torch import Tensor

BF16, INT8 = 1, 2
BLOCK = 256
LENGTHS = (1, 31, 255, 256, 257, 1000, 4096 + 33)
wires = pytest.mark.parametrize("wire", [BF16, INT8], ids=["bf16", "int8"])
halves = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def code_bytes(wire: int, numel: int) -> int:
    return 2 * numel if wire == BF16 else 4 * math.ceil(numel / BLOCK) + numel


def on_cpu(cuda: Cuda, wire: int, values: Tensor, residual: Tensor | None) -> Tensor:
    """Return the rows' codes; the residual is updated."""
    codes = torch.zeros(len(values), code_bytes(wire, values.shape[1]), dtype=torch.uint8)
    wide = values.float().contiguous()
    for i in range(len(values)):
        lost = None if residual is None else residual[i].data_ptr()
        cuda.lib.zs_wire_encode(
            ctypes.c_int(wire),
            ctypes.c_void_p(wide[i].data_ptr()),
            ctypes.c_int64(values.shape[1]),
            ctypes.c_void_p(lost),
            ctypes.c_void_p(codes[i].data_ptr()),
        )
    return codes


def decoded_on_cpu(cuda: Cuda, wire: int, codes: Tensor, like: Tensor) -> Tensor:
    wide = torch.zeros(like.shape)
    for i in range(len(codes)):
        cuda.lib.zs_wire_decode(
            ctypes.c_int(wire),
            ctypes.c_void_p(codes[i].data_ptr()),
            ctypes.c_int64(like.shape[1]),
            ctypes.c_void_p(wide[i].data_ptr()),
        )
    return wide.to(like.dtype)


def rows(parts: int, numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers with special ones in the first row: blocks that are not finite, zeros, subnormals."""
    values = torch.stack([some(numel, dtype, seed + i, special=i == 0) for i in range(parts)])
    if numel > 2 * BLOCK:
        values[-1, :BLOCK] = 0
        values[-1, BLOCK : 2 * BLOCK] *= 1e-41
    return values


def padded(codes: Tensor) -> Tensor:
    """Return rows of that length that lie farther apart, on multiples of 64 bytes."""
    whole = torch.full((len(codes), math.ceil(codes.shape[1] / 64) * 64 + 64), 3, dtype=torch.uint8)
    return whole[:, : codes.shape[1]]


@halves
@wires
def test_codes_are_those_of_the_cpu(cuda: Cuda, wire: int, dtype: torch.dtype) -> None:
    for numel in LENGTHS:
        for parts in (1, 3):
            values = rows(parts, numel, dtype, numel)
            theirs = on_cpu(cuda, wire, values, None)
            ours = padded(theirs)
            cuda.recode("encode", wire, values, None, ours)
            assert torch.equal(ours, theirs)
            assert bool((ours._base[:, theirs.shape[1] :] == 3).all())  # type: ignore[index]
            back = torch.full_like(values, 7)
            cuda.recode("decode", wire, back, None, ours)
            assert same_bits(back, decoded_on_cpu(cuda, wire, theirs, values))


@wires
def test_residuals_are_those_of_the_cpu(cuda: Cuda, wire: int) -> None:
    for numel in LENGTHS:
        mine, theirs = (torch.zeros(3, numel) for _ in range(2))
        for step in range(4):
            values = rows(3, numel, torch.float32, 10 * numel + step)
            expected = on_cpu(cuda, wire, values, theirs)
            ours = padded(expected)
            cuda.recode("encode", wire, values, mine, ours)
            assert torch.equal(ours, expected)
            assert same_bits(mine, theirs) and bool(mine.isfinite().all())


@wires
def test_special_numbers_alone(cuda: Cuda, wire: int) -> None:
    values = torch.tensor(SPECIAL).view(-1, 1)
    theirs = on_cpu(cuda, wire, values, None)
    ours = padded(theirs)
    cuda.recode("encode", wire, values, None, ours)
    assert torch.equal(ours, theirs)


def test_float64_has_no_code(cuda: Cuda) -> None:
    with pytest.raises(AssertionError, match="have no wire code"):
        cuda.recode(
            "encode", INT8, torch.zeros(1, 8).double(), None, torch.zeros(1, 64, dtype=torch.uint8)
        )
