"""torch.nn.utils.parametrize within a forward, as PEFT's `target_parameters` does.

It moves a parameter to another module and sets it to itself, which changes nothing, so
gradients are the plain model's.
"""

from __future__ import annotations

import pytest
import torch
from scenarios import FULL, WIDTH, forward_backward, message_of, wrong_in
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from zshard import FSDP


class Plus(nn.Module):
    def __init__(self, change: Tensor) -> None:
        super().__init__()
        self.change = change

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.change


class LoraOnParameter(nn.Module):
    """What PEFT puts around a module that has experts' weights, a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, 300)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 300, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        trains = self.base.weight.requires_grad
        change = self.up.weight @ self.down.weight
        parametrize.register_parametrization(self.base, "weight", Plus(change))
        self.base.parametrizations.weight.original.requires_grad_(trains)
        try:
            made: Tensor = self.base(x)
            return made
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


class Setting(nn.Module):
    """A parameter that its forward sets, to what `source` gives."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 300)
        self.source = source

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        with torch.no_grad():
            if self.source == "copy":
                weight.set_(weight * 2)
            else:
                weight.set_(weight if self.source == "itself" else weight.detach())
        return F.linear(x, weight, self.layer.bias)


def itself() -> nn.Module:
    return Setting("itself")


def alias() -> nn.Module:
    return Setting("alias")


def test_a_parametrization_in_forward(pool2):
    assert pool2.run(wrong_in, LoraOnParameter, forward_backward, True) == [{}, {}]


def frozen() -> nn.Module:
    model = LoraOnParameter()
    model.base.requires_grad_(False)
    return model


def test_a_parametrization_of_a_frozen_weight_in_forward(pool2):
    assert pool2.run(wrong_in, frozen, forward_backward, True) == [{}, {}]


@pytest.mark.parametrize("build", (itself, alias))
def test_a_parameter_that_is_set_to_its_own_memory(pool2, build):
    assert pool2.run(wrong_in, build, forward_backward, True) == [{}, {}]


def set_to_a_copy():
    strategy, transport = FULL
    model = FSDP(Setting("copy"), strategy=strategy, transport=transport)
    return message_of(lambda: forward_backward(model, 0), RuntimeError)


def test_a_parameter_that_is_set_to_other_memory_is_refused(pool2):
    for said in pool2.run(set_to_a_copy):
        assert "layer.weight" in said and "replaced" in said
