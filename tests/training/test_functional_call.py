"""torch.func on sharded models: functional_call() with other tensors, and per-sample gradients.

A functional call computes on this rank what it does on a plain model, to the bit, and the
model trains on as if it had not been.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import assert_same, differences
from models import COMBINATIONS, make
from scenarios import (
    FULL,
    WIDTH,
    check_mean_grads,
    floats,
    forward_backward,
    mean_grads,
    message_of,
    whole_grads,
)
from spawn import on_ranks
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from zshard import FSDP


class Hyper(nn.Module):
    """A network that makes the weight of another one, a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(WIDTH, 128)
        self.generator = nn.Linear(4, 128 * WIDTH)
        self.code = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.generator(self.code).view(128, WIDTH)
        made: Tensor = functional_call(self.target, {"weight": weight}, (x,))
        return made


class Big(nn.Sequential):
    """Each rank has a part of the first weight, over both transports."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 600), nn.Tanh(), nn.Linear(600, 2))


def sharded(combination: tuple[str, str], kind: Any = Big) -> Any:
    strategy, transport = combination
    return FSDP(make(kind), strategy=strategy, transport=transport)


def others() -> dict[str, Tensor]:
    """Leaves that a functional call is given in place of the parameters."""
    values = {name: p.detach() * 2 for name, p in make(Big, seed=3).named_parameters()}
    return {name: value.requires_grad_() for name, value in values.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_functional_call_with_other_tensors(combination):
    rank = dist.get_rank()
    model, plain, found = sharded(combination), make(Big), []
    for each in (model, plain):
        values = others()
        functional_call(each, values, (floats(rank),)).square().sum().backward()
        found.append({name: value.grad for name, value in values.items()})
    left = [name for name, p in model.named_parameters() if p.grad is not None]
    forward_backward(model, rank)
    wrong = differences(whole_grads(model), mean_grads(Big, forward_backward))
    assert [*differences(*found), *left, *wrong] == []


def test_hypernetwork(pool2):
    pool2.run(check_mean_grads, Hyper, forward_backward, True)


def per_sample(module: nn.Module, values: dict[str, Tensor]) -> Any:
    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        made: Tensor = functional_call(module, values, (x.unsqueeze(0),)).square().sum()
        return made

    return vmap(grad(loss), in_dims=(None, 0))(values, floats(dist.get_rank()))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", ("given", "summoned", "state dict"))
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_per_sample_gradients(combination, how):
    model, plain = sharded(combination), make(Big)
    theirs = per_sample(plain, {name: p.detach() for name, p in plain.named_parameters()})
    if how == "summoned":
        with FSDP.summon_full_params(model):
            ours = per_sample(model, {name: p.detach() for name, p in model.named_parameters()})
    elif how == "state dict":
        ours = per_sample(model, model.state_dict())
    else:
        ours = per_sample(model, dict(make(Big).state_dict()))
    assert_same(ours, theirs, "the result")


@on_ranks(2)
def test_replaced_parameter_is_refused_after_a_failed_call():
    model = sharded(FULL)
    with pytest.raises(RuntimeError, match="shapes"):
        functional_call(model, {"0.weight": torch.ones(3, 3)}, (floats(0),))
    parameter = nn.Parameter(torch.ones(600, WIDTH))
    call = functools.partial(functional_call, model, {"0.weight": parameter}, (floats(0),))
    assert "no nn.Parameter" in message_of(call, ValueError)
    model[0].weight = parameter
    said = message_of(lambda: model(floats(0)), ValueError)
    assert "'0.weight' of unit '0' was replaced" in said and "functional_call" in said


@on_ranks(2)
def test_functional_call_of_other_models_compiles():
    sharded(FULL)
    plain = nn.Linear(WIDTH, 2)
    values = {name: p.detach() for name, p in plain.named_parameters()}
    call = torch.compile(
        lambda v, x: functional_call(plain, v, (x,)), fullgraph=True, backend="eager"
    )
    assert_same(call(values, floats(0)), plain(floats(0)), "the result")
