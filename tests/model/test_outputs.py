"""A forward may return anything: zshard does not inspect results.

A result object may refer to itself, its parent or the same object many times.
"""

from __future__ import annotations

import pytest
import torch
from models import COMBINATIONS, Block, loss_of, wrapped
from scenarios import (
    WIDTH,
    floats,
    forward_backward,
    mean_grads,
    near,
    unit_of,
    whole_grads,
    wrong_grads,
)
from spawn import on_ranks
from torch import nn


class Result:
    """A node of a graph that counts accesses to its content."""

    looks = 0

    def __init__(self, tensor):
        self.tensor = tensor
        self.links = []

    def __getattribute__(self, name):
        if name == "__dict__":
            Result.looks += 1
        return super().__getattribute__(name)


class Linked(nn.Module):
    """Returns results that all refer to each other and themselves."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))

    def forward(self, x):
        results = []
        for block in self.blocks:
            x = block(x)
            results.append(Result(x))
        results += [Result(None) for _ in range(10)]
        for result in results:
            result.links = results
        return results[0]


def learn(model, rank):
    result = model(floats(rank))
    loss_of(result.links[0].tensor + result.links[1].tensor).backward()


def wrong_after(model, build, run):
    """Return the gradients of `model` that differ from a plain one's after `run`."""
    expected = mean_grads(build, run)
    ours = {name: near(grad, expected.get(name)) for name, grad in whole_grads(model).items()}
    return wrong_grads(ours, expected)


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_results_with_reference_cycles(combination):
    """Return (accesses to a forward's 12 results, the wrong gradients)."""
    model = wrapped(Linked, combination)
    Result.looks = 0
    learn(model, torch.distributed.get_rank())
    looks = Result.looks
    wrong = wrong_after(model, Linked, learn)
    assert wrong == []
    assert looks == 0, "somebody has searched a result"


class Recursive(nn.Module):
    """Calls itself, as a tree does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.stop = False

    def forward(self, x, depth=3):
        if self.stop:
            raise KeyboardInterrupt
        x = torch.tanh(self.layer(x))
        return x if depth == 0 else self(x, depth - 1)


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_next_call_ends_an_interrupted_forward(combination):
    """Return the wrong gradients after a forward through .module was interrupted."""
    model = wrapped(Recursive, combination)
    model.stop = True
    for call in (model.module, model, model.module):
        with pytest.raises(KeyboardInterrupt):
            call(floats(0))
    model.stop = False
    forward_backward(model, torch.distributed.get_rank())
    assert unit_of(model).n_open == 0
    assert wrong_after(model, Recursive, forward_backward) == []
