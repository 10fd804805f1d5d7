"""Noise of a parameter's shape: each rank would add the same numbers to other elements.

The same lines run on a plain model and on sharded ones, under one seed: correct, or refused with
the correct remedy.
"""

import numpy
import pytest
import torch
from compare import assert_same
from models import COMBINATIONS
from scenarios import message_of
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP

SHARDED = [combination for combination in COMBINATIONS if combination[0] != "no_shard"]


def by_data(p):
    p.data += 0.1 * torch.rand(*p.size())


def assigned(p):
    p.data = torch.randn(p.shape)


def asked_twice(p):
    noise = torch.randn(p.shape)
    assert noise.shape == p.shape
    p.add_(noise)


def seeded():
    return torch.Generator().manual_seed(3)


def by_numpy(p):
    p.add_(torch.from_numpy(numpy.random.default_rng(0).normal(size=tuple(p.shape))).float())


REFUSED = {
    "added": lambda p: p.add_(torch.randn(p.shape)),
    "by data": by_data,
    "a generator": lambda p: p.add_(torch.randn(p.shape, generator=seeded())),
    "numpy": by_numpy,
    "a mask": lambda p: p.mul_(torch.rand(p.shape) < 0.5),
    "in a list": lambda p: torch._foreach_add_([p], [torch.randn(p.shape)]),
    "assigned": assigned,
    "filled": lambda p: p.sub_(torch.empty(p.shape).normal_()),
    "copied": lambda p: p.copy_(torch.randn(p.shape)),
    "of a gradient": lambda p: p.grad.add_(torch.randn(p.grad.shape)),
    "asked twice": asked_twice,
}


def like(p):
    p.add_(torch.randn_like(p))
    p.grad.mul_(torch.rand_like(p.grad))


def constants(p):
    """Tensors that scripts correctly create from the shape."""
    state = torch.zeros(p.shape)
    state.mul_(0.9).add_(p.grad)
    p.sub_(state)
    p.mul_(torch.ones(p.shape)).add_(torch.full(p.shape, 0.5))


def new_noise(p):
    p.add_(p.new_zeros(p.shape).normal_())


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))  # pages on each rank


def sharded(combination):
    strategy, transport = combination
    policy = {nn.Linear}
    return FSDP(two_layers(), strategy=strategy, transport=transport, auto_wrap_policy=policy)


def changed(model, change):
    """Return a weight after `change` of all, which have gradients."""
    model(torch.ones(2, 64)).square().sum().backward()
    torch.manual_seed(5)
    with torch.no_grad():
        for layer in model:
            change(layer.weight)
    return zshard.full_tensor(model[1].weight)


@pytest.mark.sampled(14)
@pytest.mark.parametrize("combination", SHARDED)
@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_noise_by_the_shape_is_refused(name, combination):
    for _ in range(2):
        model = sharded(combination)
        text = message_of(lambda: changed(model, REFUSED[name]), zshard.ShardError)  # noqa: B023
        assert "of '0.weight'" in text and "whose values would be" in text
        assert "torch.randn_like(p)" in text


@on_ranks(2)
def test_noise_by_the_shape_is_refused_where_one_rank_has_all():
    """Only this rank draws, so that all later numbers differ."""
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(6, 6, bias=False)), transport="shm")
    model(torch.ones(2, 6)).square().sum().backward()
    is_first = torch.distributed.get_rank() == 0
    assert model[0].weight.numel() == (36 if is_first else 0)
    for change in REFUSED.values() if is_first else ():
        with torch.no_grad():
            text = message_of(lambda: change(model[0].weight), zshard.ShardError)  # noqa: B023
        assert "whose values would be" in text


@pytest.mark.sampled(6)
@pytest.mark.parametrize("combination", SHARDED)
@pytest.mark.parametrize("change", [like, constants, new_noise])
@on_ranks(2)
def test_tensors_like_the_parameter_are_correct(combination, change):
    assert_same(changed(sharded(combination), change), changed(two_layers(), change), "the weight")
