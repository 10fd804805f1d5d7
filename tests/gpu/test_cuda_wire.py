"""The kernel of wire codes (cuda/wire.cuh) against the same arithmetic in torch, bit for bit; on any
machine.

It runs as test_cuda_kernels.py says.
"""

from __future__ import annotations

import torch
from cuda_kernels import SPECIAL, Cuda, same_bits, some
from torch import Tensor

LENGTHS = (1, 7, 31, 256, 1000, 4096 + 33)


def check(cuda: Cuda, values: Tensor, lost: Tensor) -> None:
    """Encode the values; the residual is updated."""
    sums = values + lost
    expected = sums.bfloat16()
    left = sums - expected.float()
    codes = torch.full((values.numel() + 1,), 3, dtype=torch.bfloat16)
    cuda.encode(values, lost, codes[:-1])
    assert same_bits(codes[:-1], expected) and codes[-1] == 3
    assert same_bits(lost, torch.where(left.isfinite(), left, 0.0))


def test_codes_and_residuals(cuda: Cuda) -> None:
    for numel in LENGTHS:
        lost = torch.zeros(numel + 1)
        for step in range(4):
            values = some(numel + 1, torch.float32, 10 * numel + step, special=True)
            for skip in (0, 1):  # the ends of packs
                check(cuda, values[skip:], lost[skip:])


def test_special_numbers_alone(cuda: Cuda) -> None:
    check(cuda, torch.tensor(SPECIAL), torch.zeros(len(SPECIAL)))
