"""Scripts that write to parameters in a forward, as MoCo's momentum update and SwAV's prototypes do.

The new values are those that the rest of this forward computes with, on all ranks,
however far ahead or behind one of them is.
"""

from __future__ import annotations

import copy
import functools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import COMBINATIONS, differences, make
from scenarios import message_of
from torch import Tensor, nn

import zshard
from zshard import FSDP

WIDTH = 8
HYBRID = [("hybrid_shard", "c10d"), ("hybrid_full", "c10d")]


def lag(turn: int) -> None:
    """One rank falls behind the other, in turn."""
    if dist.is_initialized() and dist.get_rank() == turn % 2:
        time.sleep(0.005)


class Momentum(nn.Module):
    """Moves one layer's weights towards another's in each forward, and uses it before and after."""

    def __init__(self, update: Any) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.prototypes = nn.Linear(WIDTH, 5, bias=False)
        self.key.requires_grad_(False)
        self.update = update

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            lag(0)
            before = self.key(x)
            for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
                self.update(key, query)
                lag(1)
            norms = self.prototypes.weight.norm(dim=1, keepdim=True)
            self.prototypes.weight.copy_(self.prototypes.weight / norms)
            target = self.key(x)
        return self.prototypes(self.query(x)) + (target - before)[:, :5]


def in_place(key: Tensor, query: Tensor) -> None:
    key.mul_(0.9).add_(query, alpha=0.1)


def of_a_value(key: Tensor, query: Tensor) -> None:
    key.mul_(0.9).add_(query * 0.1)


def by_a_copy(key: Tensor, query: Tensor) -> None:
    key.copy_(key * 0.9 + query * 0.1)


def through_data(key: Tensor, query: Tensor) -> None:
    key.data.mul_(0.9).add_(query.detach().data * 0.1)


def by_new_data(key: Tensor, query: Tensor) -> None:
    key.data = key.data * 0.9 + query.data * 0.1


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05)
    losses = []
    for batch in torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(0)):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def wrong_with(update: Any, strategy: str, transport: str) -> list[str]:
    plain = make(functools.partial(Momentum, update))
    model = FSDP(
        copy.deepcopy(plain), strategy=strategy, transport=transport, auto_wrap_policy={nn.Linear}
    )
    expected = train(plain)
    wrong = [] if train(model) == expected else ["the losses"]
    return wrong + differences(model.state_dict(), plain.state_dict())


@pytest.mark.sampled(20)
@pytest.mark.parametrize("combination", [*COMBINATIONS, *HYBRID])
@pytest.mark.parametrize("update", [in_place, of_a_value, by_a_copy, through_data, by_new_data])
def test_the_rest_of_a_forward_sees_what_it_wrote(pool2: Any, update, combination) -> None:
    assert pool2.run(wrong_with, update, *combination) == [[], []]


def wrong_after_a_step_in_bf16() -> list[str]:
    """Peers read casts of the shards; here the forward writes, and computes with them."""
    plain = make(functools.partial(Momentum, in_place))
    policy = zshard.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    losses = []
    for transport in ("shm", "c10d"):
        model = FSDP(
            copy.deepcopy(plain),
            transport=transport,
            mixed_precision=policy,
            auto_wrap_policy={nn.Linear},
        )
        losses.append(train(model))
    return [] if losses[0] == losses[1] else [f"{losses}"]


def test_casts_follow_a_write(pool2: Any) -> None:
    assert pool2.run(wrong_after_a_step_in_bf16) == [[], []]


def evaluate_writing() -> tuple[str, list[str]]:
    """Follows the remedy of the error, too."""
    plain = make(functools.partial(Momentum, in_place))
    model = FSDP(copy.deepcopy(plain), transport="shm", auto_wrap_policy={nn.Linear})
    batch = torch.ones(2, WIDTH)

    def evaluate() -> None:
        with torch.no_grad():
            model(batch)

    message = message_of(evaluate, RuntimeError)
    model(batch)
    plain(batch)
    return message, differences(model.state_dict(), plain.state_dict())


def test_a_forward_without_gradients_refuses_to_write(pool2: Any) -> None:
    """One rank may run it alone, so none waits for the others there."""
    for message, wrong in pool2.run(evaluate_writing):
        assert "'key'" in message
        assert "without gradients" in message
        assert wrong == []


def write_in_join() -> str:
    build = functools.partial(Momentum, in_place)
    model = FSDP(make(build), auto_wrap_policy={nn.Linear})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.join(optimizer):
        return message_of(lambda: model(torch.ones(2, WIDTH)), RuntimeError)


def test_join_refuses_to_write_in_a_forward(pool2: Any) -> None:
    for message in pool2.run(write_in_join):
        assert "within join()" in message
