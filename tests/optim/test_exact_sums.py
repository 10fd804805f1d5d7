"""Sums of squares are exact but for those within groups of 32 elements: they depend neither on cuts,
nor on order, nor on threads."""

import math

import pytest
import torch

from zshard import _core


def squares(*tensors):
    return _core.squares_value(_core.squares(list(tensors)))


def grouped(tensor):
    """The exact sum of the groups' sums in double, by Python."""
    values = torch.cat([tensor.double(), torch.zeros(-len(tensor) % 32)]).view(-1, 4, 8)
    lanes = torch.zeros(len(values), 8, dtype=torch.float64)
    for i in range(4):
        lanes += values[:, i] * values[:, i]
    for width in (4, 2, 1):
        lanes = lanes[:, :width] + lanes[:, width:]
    return math.fsum(lanes.flatten().tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_sums_of_squares_are_exact(dtype):
    for n in (0, 1, 31, 32, 100_003):
        tensor = (torch.randn(n) * 10.0 ** torch.randint(-3, 3, (n,))).to(dtype)
        assert squares(tensor) == grouped(tensor)
    for extreme in (torch.finfo(dtype).max, torch.finfo(dtype).tiny, torch.finfo(dtype).tiny / 2):
        if dtype != torch.float64 or extreme < 1:
            tensor = torch.full((40,), extreme, dtype=dtype)
            assert squares(tensor) == grouped(tensor)
    assert squares() == 0.0
    for bad in (math.inf, -math.inf, math.nan):
        result = squares(torch.ones(40).to(dtype), torch.tensor([1.0, bad]).to(dtype))
        assert math.isnan(result) if math.isnan(bad) else result == math.inf


def test_sums_do_not_depend_on_cuts_order_or_threads():
    tensor = torch.randn(1_000_000) * 10.0 ** torch.randint(-15, 15, (1_000_000,))
    expected = squares(tensor)
    pieces = [tensor[a:b] for a, b in ((640_000, 1_000_000), (0, 32), (32, 640_000))]
    assert squares(*pieces) == expected
    numbers = [_core.squares([piece]) for piece in pieces]
    assert _core.squares_value([sum(each) for each in zip(*numbers, strict=True)]) == expected
    before = torch.get_num_threads()
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert squares(tensor) == expected
    torch.set_num_threads(before)
