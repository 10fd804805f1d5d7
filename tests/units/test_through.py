"""Over c10d, units are freed and reduced as soon as a backward has passed them: frozen, partly used
and unused ones, for any use on each rank.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from models import Case, Parts, loss_of
from scenario import Scenario
from spawn import on_ranks
from torch import nn

DEPTH = 8
WIDTH = 64
PAGE = 4096
SLOT = -(-4 * (WIDTH * WIDTH + WIDTH) // PAGE) * PAGE  # bytes of a layer's full buffer


def adapted():
    """Frozen layers, which are the units, and trainable adapters in the root."""

    def forward(model, x):
        for layer, down, up in zip(model.body, model.down, model.up, strict=True):
            x = torch.tanh(layer(x) + x @ down @ up)
        return x

    body = (nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(DEPTH))
    down = nn.ParameterList(torch.randn(WIDTH, 2) / 8 for _ in range(DEPTH))
    up = nn.ParameterList(torch.randn(2, WIDTH) / 8 for _ in range(DEPTH))
    return Parts(forward, body=nn.ModuleList(body), down=down, up=up)


class Inside(nn.Module):
    """The frozen layer and its adapter in one unit."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return torch.tanh(self.adapter(self.frozen(x)))


class Partly(nn.Module):
    """Uses one of its layers, which depends on the rank."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        return torch.tanh(self.layers[dist.get_rank() % 2](x))


class Passing(nn.Module):
    """Returns, in addition to its output, a tensor of the first block, as T5 does with its bias."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, first):
        y = torch.tanh(self.layer(x))
        return y, y if first is None else first


def shared():
    def forward(model, x):
        first = None
        for block in model.blocks:
            x, first = block(x + (0 if first is None else first), first)
        return x + first

    return Parts(forward, blocks=nn.ModuleList(Passing() for _ in range(DEPTH)))


def stack_of(kind):
    return lambda: nn.Sequential(*[kind() for _ in range(DEPTH)])


MODELS = {
    "adapters in the root": (adapted, {nn.Linear}),
    "adapters inside": (stack_of(Inside), {Inside}),
    "used in part": (stack_of(Partly), {Partly}),
    "passing on": (shared, {Passing}),
}


def scenario_of(name, transport="c10d"):
    build, policy = MODELS[name]
    draw = lambda generator: torch.randn(3, WIDTH, generator=generator)  # noqa: E731
    case = Case(build, draw, policy, unused=True)
    return Scenario(case, ("full_shard", transport), "zshard.SGD")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_two_ranks_are_bit_identical_to_ddp(name, transport):
    scenario_of(name, transport).same()


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2, 3)
def test_at_most_two_full_buffers_and_buckets(name):
    """DEPTH units pass: the peak of an all-frozen body with adapters, among others."""
    memory = scenario_of(name).sharded(3).model.memory()
    params = {"adapters inside": 2, "used in part": 2}.get(name, 1)  # of a layer's size, in a unit
    root = SLOT if name == "adapters in the root" else 0
    for part in ("slots", "buckets"):
        assert 0 < memory[part] <= 2 * params * SLOT + root


@pytest.mark.parametrize("name", ["passing on", "used in part"])
@on_ranks(2)
def test_each_unit_takes_one_gather_and_one_round(name):
    """Also where a result passes through it, or a part of it is used."""
    training = scenario_of(name).sharded(1)
    with Collectives() as forward:
        loss = loss_of(training.model(training.scenario.case.batch(1, training.rank)))
    with Collectives() as backward:
        loss.backward()
    found = forward.gathers, backward.gathers, backward.scatters
    assert found == (DEPTH, DEPTH - 1, DEPTH)
