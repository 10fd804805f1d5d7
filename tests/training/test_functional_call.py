"""torch.func on sharded models: functional_call() with other tensors, and per-sample gradients.

A functional call computes on this rank what it does on a plain model, to the bit, and the
model trains on as if it had not been.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import COMBINATIONS, make, wrapped
from rows import all_refused
from scenarios import (
    FULL,
    WIDTH,
    check_mean_grads,
    floats,
    forward_backward,
    mean_grads,
    whole_grads,
)
from spawn import on_ranks
from torch import nn
from torch.func import functional_call, grad, vmap

from zshard import FSDP


class Hyper(nn.Module):
    """A network that makes the weight of another one, a unit."""

    def __init__(self):
        super().__init__()
        self.target = nn.Linear(WIDTH, 128)
        self.generator = nn.Linear(4, 128 * WIDTH)
        self.code = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x):
        weight = self.generator(self.code).view(128, WIDTH)
        return functional_call(self.target, {"weight": weight}, (x,))


def wide():
    """Each rank has a part of the first weight, over both transports."""
    return nn.Sequential(nn.Linear(WIDTH, 600), nn.Tanh(), nn.Linear(600, 2))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_functional_call_with_other_tensors(combination):
    rank, found = dist.get_rank(), []
    model = wrapped(wide, combination)
    for each in (model, make(wide)):
        named = make(wide, seed=3).named_parameters()
        values = {name: (p.detach() * 2).requires_grad_() for name, p in named}
        functional_call(each, values, (floats(rank),)).square().sum().backward()
        found.append({name: value.grad for name, value in values.items()})
    assert_same(*found, "the gradients of the other tensors")
    assert all(p.grad is None for p in model.parameters())
    forward_backward(model, rank)
    assert_same(whole_grads(model), mean_grads(wide, forward_backward), "the gradients")


@on_ranks(2)
def test_hypernetwork():
    check_mean_grads(Hyper, forward_backward, True)


def per_sample(module, values):
    def loss(values, x):
        return functional_call(module, values, (x.unsqueeze(0),)).square().sum()

    values = {name: value.detach() for name, value in dict(values).items()}
    return vmap(grad(loss), in_dims=(None, 0))(values, floats(dist.get_rank()))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", ("given", "summoned", "state dict"))
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_per_sample_gradients(combination, how):
    model, plain = wrapped(wide, combination), make(wide)
    if how == "summoned":
        with FSDP.summon_full_params(model):
            ours = per_sample(model, model.named_parameters())
    else:
        ours = per_sample(model, (plain if how == "given" else model).state_dict())
    assert_same(ours, per_sample(plain, plain.named_parameters()), "the gradients")


@on_ranks(2)
def test_replaced_parameter_is_refused_after_a_failed_call():
    model, parameter = wrapped(wide, FULL), nn.Parameter(torch.ones(600, WIDTH))

    def call_with(value):
        return lambda: functional_call(model, {"0.weight": value}, (floats(0),))

    def replaced():
        model[0].weight = parameter
        model(floats(0))

    all_refused(
        {
            "another shape": (call_with(torch.ones(3, 3)), RuntimeError, "shapes"),
            "a parameter": (call_with(parameter), ValueError, "no nn.Parameter"),
            "replaced": (replaced, ValueError, "'0.weight' of unit '0' was replaced"),
            "the remedy": (replaced, ValueError, "functional_call"),
        }
    )


@on_ranks(2)
def test_functional_call_of_other_models_compiles():
    wrapped(wide, FULL)
    plain = nn.Linear(WIDTH, 2)
    values = {name: p.detach() for name, p in plain.named_parameters()}
    call = torch.compile(
        lambda v, x: functional_call(plain, v, (x,)), fullgraph=True, backend="eager"
    )
    assert_same(call(values, floats(0)), plain(floats(0)), "the result")
