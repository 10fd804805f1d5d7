"""full_tensor() within a forward is refused where it would silently drop a gradient.

The error's remedy gives plain PyTorch's gradients.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import differences
from models import COMBINATIONS
from scenarios import message_of
from spawn import RankPool, ranks
from torch import Tensor, nn
from torch.nn import functional as F

import zshard
from zshard import FSDP


class Tied(nn.Module):
    """An output layer that uses the embedding's weight; `weight` returns it."""

    def __init__(self, weight: Callable[[Any], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(10, 4)
        self.layer = nn.Linear(4, 4)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layer(self.emb(x)), self.weight(self))


def itself(model: Any) -> Tensor:
    weight: Tensor = model.emb.weight
    return weight


def without_grad(model: Any) -> Tensor:
    with torch.no_grad():
        return zshard.full_tensor(model.emb.weight)


REFUSED: dict[str, Callable[[Any], Tensor]] = {
    "full_tensor": lambda model: zshard.full_tensor(model.emb.weight),
    "whole_named_parameters": lambda model: dict(zshard.whole_named_parameters(model))[
        "emb.weight"
    ],  # type: ignore[dict-item, return-value]
}
VALUES: dict[str, Callable[[Any], Tensor]] = {
    "no_grad": without_grad,
    "detach()": lambda model: zshard.full_tensor(model.emb.weight.detach()),
}


def grads_of(model: Any) -> dict[str, Tensor]:
    """Return full gradients of one backward."""
    model(torch.arange(4)).square().sum().backward()
    found = zshard.whole_named_parameters(model, grads=True)
    return {name: grad for name, grad in found if grad is not None}


def wrong(combination: tuple[str, str]) -> list[str]:
    strategy, transport = combination

    def wrapped(weight: Callable[[Any], Tensor]) -> Any:
        policy = {nn.Embedding, nn.Linear}
        return FSDP(Tied(weight), strategy=strategy, transport=transport, auto_wrap_policy=policy)

    found = []
    for refused in REFUSED.values():
        model = wrapped(refused)
        for _ in range(2):
            text = message_of(lambda: model(torch.arange(4)), zshard.ShardError)  # noqa: B023
            assert re.search(
                "full tensor of 'emb.weight'.* no gradient .*parameter itself", text
            ), text
        model.weight = itself
        found += differences(grads_of(model), grads_of(Tied(lambda m: m.emb.weight)))
        zshard.full_tensor(model.emb.weight)
        zshard.full_tensor(model.emb.weight.grad)
    for values in VALUES.values():
        constant = grads_of(Tied(lambda m: m.emb.weight.detach()))
        found += differences(grads_of(wrapped(values)), constant)
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("combination", COMBINATIONS)
@ranks(2)
def test_remedy_gives_the_plain_models_gradients(
    pool: RankPool, combination: tuple[str, str]
) -> None:
    assert pool.run(wrong, combination) == [[], []]


@ranks(1)
def test_single_process(pool: RankPool) -> None:
    assert pool.run(wrong, ("full_shard", "auto")) == [[]]
