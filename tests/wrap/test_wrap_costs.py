"""Costs of FSDP(model) besides its memory: exchanges between ranks."""

from __future__ import annotations

import sys

import torch
from spawn import on_ranks
from torch import nn

from zshard import FSDP


def exchanges(n_units: int) -> int:
    """Return how many exchanges wrapping such a model takes."""
    counted: list[object] = []
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(n_units)])
    sys.setprofile(lambda _frame, event, arg: counted.append(arg) if event == "c_call" else None)
    try:
        FSDP(model, auto_wrap_policy={nn.Linear})
    finally:
        sys.setprofile(None)
    return sum(each.__name__ == "exchange" for each in counted)


@on_ranks(2)
def test_exchanges_do_not_grow_with_units():
    torch.manual_seed(0)
    exchanges(2)  # the first one connects
    assert exchanges(2) == exchanges(9) > 0
