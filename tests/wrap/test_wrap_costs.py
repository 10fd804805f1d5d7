"""What FSDP(model) costs besides its memory: exchanges between ranks, searches for garbage."""

from __future__ import annotations

import gc
import sys

import pytest
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


@on_ranks(2)
def test_no_full_garbage_collection_while_wrapping():
    before, seen = gc.get_threshold(), []

    def init(module: nn.Module) -> None:
        seen.append(gc.get_threshold())
        assert len(seen) < 3, "enough"
        module.reset_parameters()

    with torch.device("meta"):
        made, refused = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    FSDP(made, param_init_fn=init)
    with pytest.raises(AssertionError, match="enough"):
        FSDP(refused, param_init_fn=init)
    assert all(each[:2] == before[:2] and each[2] > 1000 * before[2] for each in seen)
    assert gc.get_threshold() == before
