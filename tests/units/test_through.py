"""Over c10d, units are freed and reduced as soon as a backward has passed them: frozen, partly used
and unused ones, whatever each rank uses of them.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from models import ddp, differences, make
from scenarios import loss_of
from spawn import ranks
from torch import nn

from zshard import FSDP

DEPTH = 8
WIDTH = 64
PAGE = 4096
SLOT = -(-4 * (WIDTH * WIDTH + WIDTH) // PAGE) * PAGE  # bytes of a layer's full buffer


class Adapted(nn.Module):
    """A frozen layer, which is the unit, beside a trainable adapter in the root."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(DEPTH)
        )
        self.down = nn.ParameterList(torch.randn(WIDTH, 2) / 8 for _ in range(DEPTH))
        self.up = nn.ParameterList(torch.randn(2, WIDTH) / 8 for _ in range(DEPTH))

    def forward(self, x):
        for layer, down, up in zip(self.body, self.down, self.up, strict=True):
            x = torch.tanh(layer(x) + x @ down @ up)
        return x


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
    """Returns, beside its own output, a tensor of the first block, as T5 does with its bias."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, first):
        y = torch.tanh(self.layer(x))
        return y, y if first is None else first


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Passing() for _ in range(DEPTH))

    def forward(self, x):
        first = None
        for block in self.blocks:
            x, first = block(x + (0 if first is None else first), first)
        return x + first


class Skipping(nn.Module):
    """A layer in the middle of the model that no forward uses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if i != DEPTH // 2:
                x = torch.tanh(layer(x))
        return x


def stack_of(kind):
    return lambda: nn.Sequential(*[kind() for _ in range(DEPTH)])


MODELS = {
    "adapters in the root": (Adapted, {nn.Linear}),
    "adapters inside": (stack_of(Inside), {Inside}),
    "used in part": (stack_of(Partly), {Partly}),
    "passing on": (Shared, {Passing}),
    "one unused": (Skipping, {nn.Linear}),
}


def batch(step=0):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(3, WIDTH, generator=generator)


def trained(model, parallel):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(parallel(batch(step))).backward()
        optimizer.step()
    return model.state_dict()


def compare(name):
    """Return (what differs from DDP, bytes of the slots, of the buckets)."""
    build, policy = MODELS[name]
    plain = make(build)
    expected = trained(plain, ddp(plain, find_unused_parameters=True))
    model = FSDP(make(build), transport="c10d", auto_wrap_policy=policy)
    ours = trained(model, model)
    memory = model.memory()
    return differences(ours, expected), memory["slots"], memory["buckets"]


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_are_bit_identical_to_ddp(pool2, name):
    assert [wrong for wrong, *_ in pool2.run(compare, name)] == [[], []]


@ranks(2, 3)
@pytest.mark.parametrize("name", MODELS)
def test_at_most_two_full_buffers_and_buckets(pool, name):
    """DEPTH units pass: the peak of an all-frozen body with adapters, among others."""
    params = {"adapters inside": 2, "used in part": 2}.get(name, 1)  # of a layer's size, in a unit
    root = SLOT if name == "adapters in the root" else 0
    for _, slots, buckets in pool.run(compare, name):
        assert 0 < slots <= 2 * params * SLOT + root
        assert 0 < buckets <= 2 * params * SLOT + root


def gathers_of(name):
    """Return gathers in forward and in backward, and exchanges of gradients."""
    build, policy = MODELS[name]
    model = FSDP(make(build), transport="c10d", auto_wrap_policy=policy)
    loss_of(model(batch())).backward()
    with Collectives() as forward:
        loss = loss_of(model(batch()))
    with Collectives() as backward:
        loss.backward()
    return forward.gathers, backward.gathers, backward.scatters


def test_passed_through_results_cause_no_gather(pool2):
    assert pool2.run(gathers_of, "passing on") == [(DEPTH, DEPTH - 1, DEPTH)] * 2


def test_partly_used_unit_takes_one_round(pool2):
    expected = (DEPTH, DEPTH - 1, DEPTH)
    assert pool2.run(gathers_of, "used in part") == [expected] * 2
