"""Noise of a parameter's shape: each rank would add the same numbers to other elements.

The same lines run on a plain model and on sharded ones, under one seed: correct, or refused with
the correct remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from compare import assert_same
from models import COMBINATIONS
from scenarios import message_of
from spawn import RankPool, on_ranks, ranks
from torch import Tensor, nn

import zshard
from zshard import FSDP

SHARDED = [combination for combination in COMBINATIONS if combination[0] != "no_shard"]


def add_randn(p: Any) -> None:
    p.add_(torch.randn(p.shape))


def by_size(p: Any) -> None:
    p.data += 0.1 * torch.rand(*p.size())


def own_generator(p: Any) -> None:
    p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(3)))


def by_numpy(p: Any) -> None:
    p.add_(torch.from_numpy(numpy.random.default_rng(0).normal(size=tuple(p.shape))).float())


def kept_mask(p: Any) -> None:
    p.mul_(torch.rand(p.shape) < 0.5)


def in_a_list(p: Any) -> None:
    torch._foreach_add_([p], [torch.randn(p.shape)])


def assigned(p: Any) -> None:
    p.data = torch.randn(p.shape)


def filled(p: Any) -> None:
    p.sub_(torch.empty(p.shape).normal_())


def copied(p: Any) -> None:
    p.copy_(torch.randn(p.shape))


def gradient_noise(p: Any) -> None:
    p.grad.add_(torch.randn(p.grad.shape))


def asked_twice(p: Any) -> None:
    noise = torch.randn(p.shape)
    assert noise.shape == p.shape
    p.add_(noise)


REFUSED = [
    *(add_randn, by_size, own_generator, by_numpy, kept_mask, in_a_list, assigned, filled),
    *(copied, gradient_noise, asked_twice),
]


def like(p: Any) -> None:
    p.add_(torch.randn_like(p))
    p.grad.mul_(torch.rand_like(p.grad))


def constants(p: Any) -> None:
    """Tensors that scripts correctly create from the shape."""
    state = torch.zeros(p.shape)
    state.mul_(0.9).add_(p.grad)
    p.sub_(state)
    p.mul_(torch.ones(p.shape)).add_(torch.full(p.shape, 0.5))


def new_noise(p: Any) -> None:
    noise = p.new_zeros(p.shape)
    noise.normal_()
    p.add_(noise)


RIGHT = [like, constants, new_noise]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))  # pages on each rank


def outcome(made: Any, change: Callable[[Any], None]) -> Tensor:
    made(torch.ones(2, 64)).square().sum().backward()
    torch.manual_seed(5)
    with torch.no_grad():
        for param in made.parameters():
            if param.ndim == 2:
                change(param)
    return zshard.full_tensor(made[1].weight)


@pytest.mark.sampled(14)
@pytest.mark.parametrize("combination", SHARDED)
@pytest.mark.parametrize("change", REFUSED)
@on_ranks(2)
def test_noise_by_the_shape_is_refused(combination, change):
    strategy, transport = combination
    found = []
    for _ in range(2):
        made = FSDP(model(), strategy=strategy, transport=transport, auto_wrap_policy={nn.Linear})
        found.append(message_of(lambda: outcome(made, change), zshard.ShardError))  # noqa: B023
    texts = found
    for text in texts:
        assert "of '0.weight'" in text and "whose values would be" in text
        assert "torch.randn_like(p)" in text


def refusals_where_one_rank_has_all(transport: str, change: Callable[[Any], None]) -> str:
    torch.manual_seed(0)
    made = FSDP(nn.Sequential(nn.Linear(6, 6, bias=False)), transport=transport)
    made(torch.ones(2, 6)).square().sum().backward()
    has_all = made[0].weight.numel() == 36
    with torch.no_grad():
        found = message_of(lambda: change(made[0].weight), zshard.ShardError) if has_all else ""
    return found if has_all else f"{made[0].weight.numel()} elements"


@pytest.mark.parametrize("change", REFUSED)
@ranks(2)
def test_noise_by_the_shape_is_refused_where_one_rank_has_all(
    pool: RankPool, change: Callable[[Any], None]
) -> None:
    """What this rank draws, the other does not, so that all later numbers differ."""
    first, second = pool.run(refusals_where_one_rank_has_all, "shm", change)
    assert "whose values would be" in first
    assert second == "0 elements"


def right(combination: tuple[str, str], change: Callable[[Any], None]) -> None:
    strategy, transport = combination
    made = FSDP(model(), strategy=strategy, transport=transport, auto_wrap_policy={nn.Linear})
    assert_same(outcome(made, change), outcome(model(), change), "the weight")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("combination", SHARDED)
@pytest.mark.parametrize("change", RIGHT)
@ranks(2)
def test_tensors_like_the_parameter_are_correct(
    pool: RankPool, combination: tuple[str, str], change: Callable[[Any], None]
) -> None:
    assert pool.run(right, combination, change) == [None, None]
