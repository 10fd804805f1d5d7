"""`p.grad_dtype = torch.float32` of bfloat16 parameters: refused by name, before and after wrapping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import COMBINATIONS
from scenarios import message_of
from spawn import RankPool, ranks
from torch import nn

from zshard import FSDP, MixedPrecision


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)


def refusals(combination: tuple[str, str], dtype: Any) -> list[str]:
    """What is said before wrapping, and after it: at once, or in the next training forward."""
    strategy, transport = combination

    def wrap(made: nn.Module, **options: Any) -> Any:
        return FSDP(made, strategy=strategy, transport=transport, **options)

    def step(made: Any) -> None:
        made(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum().backward()

    def set_it(param: nn.Parameter) -> None:
        param.grad_dtype = dtype

    def later(made: Any) -> None:
        set_it(made[1].weight)
        step(made)

    def message(function: Callable[[], Any]) -> str:
        return message_of(function, NotImplementedError)

    early = model()
    set_it(early[1].weight)
    found = [message(lambda: wrap(early))]
    late = wrap(model())
    found += [message(lambda: later(late))]
    if late[1].weight.grad_dtype == dtype:  # whole: nothing was asked when it was set
        found += [message(lambda: step(late))]
        set_it_back = late[1].weight
        set_it_back.grad_dtype = torch.bfloat16
    step(late)
    remedy = wrap(model(torch.float32), mixed_precision=MixedPrecision(torch.bfloat16))
    remedy[1].weight.grad_dtype = torch.float32  # its own: says nothing new
    step(remedy)
    assert {p.grad.dtype for p in remedy.parameters()} == {torch.float32}
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, None])
@pytest.mark.parametrize("combination", COMBINATIONS)
@ranks(2)
def test_it_is_refused_by_name(pool: RankPool, combination: tuple[str, str], dtype: Any) -> None:
    for found in pool.run(refusals, combination, dtype):
        for text in found:
            assert "parameter '1.weight' has" in text and "grad_dtype" in text
            assert "MixedPrecision(param_dtype=torch.bfloat16)" in text
