"""Scenarios whose gradients must be the mean of the ranks' gradients, whatever is sharded."""

from __future__ import annotations

import functools
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from models import COMBINATIONS, Block, Unused, loss_of
from scenarios import WIDTH, Stack, check_mean_grads, floats, forward_backward
from scripts import (
    SCENARIOS,
    accumulate,
    forward_without_backward,
    retain_graph,
    two_forwards_backwards_the_other_way,
)
from torch import nn


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("run", "exact"), SCENARIOS)
def test_gradients_are_the_mean_over_ranks(pool2, run, exact):
    pool2.run(check_mean_grads, Stack, run, exact)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "run",
    [accumulate, two_forwards_backwards_the_other_way, retain_graph, forward_without_backward],
)
def test_gradients_on_three_ranks(pool3, run):
    pool3.run(check_mean_grads, Stack, run, False)


# --- models that do something unusual inside -------------------------------------------------------


class CalledTwice(nn.Module):
    """Each block runs twice in a forward, and one once more at the end."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(block(x))
        return self.blocks[0](x)


class Halves(nn.Module):
    """Units of which a rank may leave out a half."""

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
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, full=True):
        for part in self.parts:
            x = part(x, full)
        return self.head(x)


class AllKinds(nn.Module):
    """In one unit: tied, frozen, of three dtypes, of no dimension, empty, and not contiguous."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight
        self.two.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(()) + 1.0)
        self.frozen_scale = nn.Parameter(torch.rand(()) + 1.0, requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.across = nn.Parameter(torch.randn(5, WIDTH).t())
        self.coarse = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.fine = nn.Linear(5, 3).double()

    def forward(self, x):
        x = torch.tanh(self.two(torch.tanh(self.one(x)))) * self.scale * self.frozen_scale
        x = x @ self.across.contiguous() + self.empty.sum()
        return self.fine((x * self.coarse.float()).double())


Pair = namedtuple("Pair", "first second")


@dataclass
class Result:
    logits: torch.Tensor
    extra: dict


class Outputs(nn.Module):
    """Returns its tensors in containers of a kind; so do its blocks."""

    class Part(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.kind = kind

        def forward(self, x):
            a, b = self.linear(x), self.linear(x * 2)
            return {
                "tuple": (a, b),
                "list": [a, "text", b],
                "dict": {"a": a, "n": 3, "b": b},
                "namedtuple": Pair(a, b),
                "dataclass": Result(a, {"deep": [b, None]}),
                "object": PlainResult(a, b),
            }[self.kind]

    def __init__(self, kind):
        super().__init__()
        self.parts = nn.ModuleList(Outputs.Part(kind) for _ in range(3))

    def forward(self, x):
        for part in self.parts:
            result = part(x)
            first, second = tensors_of(result)
            x = first + second
        return result


class PlainResult:
    def __init__(self, first, second):
        self.first, self.second = first, second


def tensors_of(result):
    if isinstance(result, Result):
        return result.logits, result.extra["deep"][0]
    if isinstance(result, dict):
        return result["a"], result["b"]
    if isinstance(result, PlainResult):
        return result.first, result.second
    return result[0], result[-1]


class Detours(nn.Module):
    """A unit that only sometimes runs, in a root that holds a weight of its own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x, skip=None, shifted=True):
        for number, block in enumerate(self.blocks):
            if number != skip:
                x = block(x)
        return x + self.shift if shifted else x


class SparseTable(nn.Module):
    """Embeddings with sparse gradients, of which each rank touches some rows."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(13, WIDTH, sparse=True)
        self.bags = nn.EmbeddingBag(7, WIDTH, mode="sum", sparse=True)
        self.block = Block(WIDTH)

    def forward(self, x):
        ids = x.argsort(-1)
        return self.block(self.rows(ids[:, 0] + ids[:, 1] % 4) + self.bags(ids[:, 2:5] % 7))


def use_one_of_the_outputs(model, rank):
    tensors_of(model(floats(rank)))[1].square().mean().backward()


def use_both_outputs(model, rank):
    first, second = tensors_of(model(floats(rank)))
    (first.square().mean() + second.sin().mean()).backward()


def skip_on_rank_1(model, rank):
    loss_of(model(floats(rank), skip=1 if rank == 1 else None)).backward()


def skip_the_root_weight_on_rank_1(model, rank):
    loss_of(model(floats(rank), shifted=rank == 0)).backward()


def use_one_half_on_rank_1(model, rank):
    loss_of(model(floats(rank), full=rank == 0)).backward()


def skip_another_on_each_rank(model, rank):
    for step in range(2):
        loss_of(model(floats(rank, step), skip=(rank + step) % 3)).backward()


def run_only_a_block_on_rank_1(model, rank):
    loss_of(model.blocks[2](floats(rank)) if rank == 1 else model(floats(rank))).backward()


# (model, arguments, scenario, to the bit?)
UNUSUAL = [
    (CalledTwice, (), forward_backward, True),
    (CalledTwice, (), accumulate, False),
    (Halves, (), use_one_half_on_rank_1, True),
    (Unused, (), forward_backward, True),
    (Unused, (), accumulate, False),
    (SparseTable, (), forward_backward, True),
    (SparseTable, (), accumulate, False),
    *((Outputs, (kind,), use_both_outputs, True)
      for kind in ("tuple", "list", "dict", "namedtuple", "dataclass", "object")),
    (Outputs, ("tuple",), use_one_of_the_outputs, True),
    (Detours, (), skip_the_root_weight_on_rank_1, True),
]  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("cls", "args", "run", "exact"), UNUSUAL)
def test_unusual_models(pool2, cls, args, run, exact):
    build = functools.partial(cls, *args)
    pool2.run(check_mean_grads, build, run, exact)


def test_all_kinds_of_parameters_in_one_unit(pool2):
    """The gradient of each is the mean of the ranks', and what is frozen has none."""
    pool2.run(check_mean_grads, AllKinds, forward_backward, True, COMBINATIONS, None)


@pytest.mark.parametrize(
    ("run", "exact"),
    [
        (skip_on_rank_1, True),
        (skip_another_on_each_rank, False),
        (run_only_a_block_on_rank_1, True),
    ],
)
def test_ranks_may_run_different_units(pool2, run, exact):
    pool2.run(check_mean_grads, Detours, run, exact)


class Adapted(nn.Module):
    """Blocks of a frozen layer, and behind it a trainable one (LoRA): the block's own gradients are
    there before backward goes through its frozen weight."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.down = nn.Linear(WIDTH, 2, bias=False)
            self.up = nn.Linear(2, WIDTH, bias=False)

        def forward(self, x):
            y = torch.tanh(self.base(x))
            return x + y + self.up(self.down(y))

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Adapted.Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2).requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(("run", "exact"), [(forward_backward, True), (accumulate, False)])
def test_adapters_on_frozen_layers(pool2, run, exact):
    pool2.run(check_mean_grads, Adapted, run, exact)
