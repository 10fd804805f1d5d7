"""Scenarios whose gradients must be the mean of the ranks' gradients, under every strategy."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from models import COMBINATIONS, Block, Parts, Unused, loss_of
from scenarios import WIDTH, Stack, check_mean_grads, floats, forward_backward
from scripts import (
    SCENARIOS,
    accumulate,
)
from spawn import on_ranks
from torch import nn


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("run", "exact"), SCENARIOS)
@on_ranks(2, 3)
def test_gradients_are_the_mean_over_ranks(run, exact):
    check_mean_grads(Stack, run, exact and dist.get_world_size() == 2)


# --- models that do something unusual inside ------------------------------------------------------


def called_twice():
    """Each block runs twice in a forward, and one once more at the end."""

    def forward(model, x):
        for block in model.blocks:
            x = block(block(x))
        return model.blocks[0](x)

    return Parts(forward, blocks=nn.ModuleList(Block(WIDTH) for _ in range(2)))


class Halves(nn.Module):
    """Units, half of which a rank may leave out; and so of the root's own weights."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.always = nn.Linear(WIDTH, WIDTH)
            self.sometimes = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, full):
            x = torch.tanh(self.always(x))
            return x + self.sometimes(x) if full else x

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Halves.Part() for _ in range(2))
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, full=True):
        for part in self.parts:
            x = part(x, full)
        return self.head(x + self.shift if full else x)


def all_kinds():
    """In one unit: tied, frozen, of three dtypes, of no dimension, empty, and not contiguous."""

    def forward(model, x):
        x = torch.tanh(model.two(torch.tanh(model.one(x)))) * model.scale * model.frozen_scale
        x = x @ model.across.contiguous() + model.empty.sum()
        return model.fine((x * model.coarse.float()).double())

    model = Parts(
        forward,
        one=nn.Linear(WIDTH, WIDTH),
        two=nn.Linear(WIDTH, WIDTH),
        scale=nn.Parameter(torch.rand(()) + 1.0),
        frozen_scale=nn.Parameter(torch.rand(()) + 1.0, requires_grad=False),
        empty=nn.Parameter(torch.empty(0, 3)),
        across=nn.Parameter(torch.randn(5, WIDTH).t()),
        coarse=nn.Parameter(torch.randn(5, dtype=torch.bfloat16)),
        fine=nn.Linear(5, 3).double(),
    )
    model.two.weight = model.one.weight
    model.two.bias.requires_grad_(False)
    return model


def sparse_table():
    """Embeddings with sparse gradients; each rank touches some rows."""

    def forward(model, x):
        ids = x.argsort(-1)
        return model.block(model.rows(ids[:, 0] + ids[:, 1] % 4) + model.bags(ids[:, 2:5] % 7))

    rows = nn.Embedding(13, WIDTH, sparse=True)
    bags = nn.EmbeddingBag(7, WIDTH, mode="sum", sparse=True)
    return Parts(forward, rows=rows, bags=bags, block=Block(WIDTH))


def use_one_half_on_rank_1(model, rank):
    loss_of(model(floats(rank), full=rank == 0)).backward()


def run_only_a_block_on_rank_1(model, rank):
    loss_of(model.blocks[2](floats(rank)) if rank == 1 else model(floats(rank))).backward()


# (model, scenario, bit for bit?, policy)
UNUSUAL = [
    (called_twice, forward_backward, True, "auto"),
    (called_twice, accumulate, False, "auto"),
    (Halves, use_one_half_on_rank_1, True, "auto"),
    (Unused, forward_backward, True, "auto"),
    (Unused, accumulate, False, "auto"),
    (sparse_table, forward_backward, True, "auto"),
    (sparse_table, accumulate, False, "auto"),
    (all_kinds, forward_backward, True, None),
    (Stack, run_only_a_block_on_rank_1, True, "auto"),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("build", "run", "exact", "policy"), UNUSUAL)
@on_ranks(2)
def test_unusual_models(build, run, exact, policy):
    """A parameter that no rank uses, or that is frozen, has no gradient."""
    check_mean_grads(build, run, exact, COMBINATIONS, policy)
