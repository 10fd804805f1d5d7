"""Complex parameters: refused where they train, and what the error says to do instead trains as plain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import make
from scenarios import WIDTH, forward_backward, message_of, wrong_in
from spawn import RankPool, ranks
from torch import Tensor, nn

from zshard import FSDP


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(self.first_value())

    def first_value(self) -> Tensor:
        return torch.randn(WIDTH, 150, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Any:
        return (x.to(torch.complex64) @ self.weight).abs()


class MixingAsReal(Mixing):
    def first_value(self) -> Tensor:
        return torch.view_as_real(super().first_value())

    def forward(self, x: Tensor) -> Any:
        return (x.to(torch.complex64) @ torch.view_as_complex(self.weight)).abs()


def refused(strategy: str) -> str:
    return message_of(lambda: FSDP(make(Mixing), strategy=strategy), ValueError)


@pytest.mark.parametrize("strategy", ("full_shard", "no_shard"))
@ranks(2)
def test_a_complex_parameter_that_trains_is_refused(pool: RankPool, strategy: str) -> None:
    for said in pool.run(refused, strategy):
        assert "'weight'" in said and "nn.Parameter(torch.view_as_real(w))" in said


def test_its_real_view_trains(pool2):
    assert pool2.run(wrong_in, MixingAsReal, forward_backward, True) == [{}, {}]
