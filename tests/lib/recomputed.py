"""Models that recompute a section in backward, in every way that models do.

A way is a forward of `Stack`, which recomputes some of its blocks, or parts of them.
"""

from __future__ import annotations

import functools

import pytest
import torch
from models import Block
from scenarios import WIDTH, floats
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

KINDS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


class Half(Block):
    """A block that recomputes only its first half, if `kind` selects that."""

    kind: bool | None = None
    raw = False  # whether the recomputed half reads its weights directly

    def first(self, x):
        if self.raw:
            return F.relu(F.linear(self.norm(x), self.up.weight, self.up.bias))
        return F.relu(self.up(self.norm(x)))

    def forward(self, x):
        if self.kind is None:
            return x + self.down(self.first(x))
        return x + self.down(checkpoint(self.first, x, use_reentrant=self.kind))


class Stack(nn.Module):
    """Four blocks, each a unit, in a root with its own weight and head."""

    def __init__(self, way, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(Half(WIDTH) for _ in range(4))
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.head = nn.Linear(WIDTH, 2)
        self.way, self.reentrant = way, reentrant
        for block in self.blocks:
            block.kind = reentrant if way in INSIDE else None
            block.raw = way is within_units_by_weight

    def again(self, function, *args):
        """Return `function(*args)`, recomputed in backward."""
        return checkpoint(function, *args, use_reentrant=self.reentrant)

    def run(self, x, begin=0, end=4):
        for block in self.blocks[begin:end]:
            x = block(x)
        return x

    def each_again(self, x, begin=0, end=4):
        for block in self.blocks[begin:end]:
            x = self.again(block, x)
        return x

    def shifted(self, x, number):
        return self.blocks[number](x) + self.shift

    def forward(self, x):
        if x.is_leaf:  # reentrant checkpoints need an input that requires a gradient
            x.requires_grad_()
        return self.head(self.way(self, x) + self.shift)


def around_units(model, x):
    return model.each_again(x)


def around_some_units(model, x):
    for number, block in enumerate(model.blocks):
        x = model.again(block, x) if number % 2 else block(x)
    return x


def around_all_units(model, x):
    return model.again(model.run, x)


def around_stretches(model, x):
    return model.again(model.run, model.again(model.run, x, 0, 2), 2, 4)


def around_units_and_a_weight_of_the_root(model, x):
    for number in range(4):
        x = model.again(model.shifted, x, number)
    return x


def nested(model, x):
    return model.again(model.each_again, model.again(model.each_again, x, 0, 2), 2, 4)


def nested_three_deep(model, x):
    return model.again(functools.partial(nested, model), x)


def units_twice(model, x):
    return model.each_again(model.each_again(x))


def units_thrice(model, x):
    return model.each_again(units_twice(model, x))


def once_again_and_once_not(model, x):
    return model.each_again(model.run(x))


def within_units(model, x):
    return model.run(x)


def within_units_by_weight(model, x):
    return model.run(x)


def within_and_around_units(model, x):
    return model.each_again(x)


def around_parts_of_the_root(model, x):
    return model.again(lambda x: torch.tanh(x * model.shift + x), model.run(x))


INSIDE = (within_units, within_units_by_weight, within_and_around_units)
WAYS = [
    around_units,
    around_some_units,
    around_all_units,
    around_stretches,
    around_units_and_a_weight_of_the_root,
    nested,
    nested_three_deep,
    units_twice,
    units_thrice,
    once_again_and_once_not,
    around_parts_of_the_root,
    *INSIDE,
]


def leaf(rank, step=0):
    """Return an input that requires a gradient: reentrant checkpoints need one."""
    return floats(rank, step).requires_grad_()
