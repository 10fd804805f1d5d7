"""Calls other than the usual: of registered methods, of submodules, and of forwards with unusual results.

Registered methods gather and reduce as forward does. A submodule that a script calls directly, as
generate() does with an encoder, may use weights of a unit above it; these are then unsharded, since
an embedding would silently read wrong rows of a shard. zshard does not inspect results.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import COMBINATIONS, Block, loss_of, make, wrapped
from rows import all_refused
from scenarios import (
    WIDTH,
    floats,
    forward_backward,
    mean_grads,
    near,
    unit_of,
    whole_grads,
)
from spawn import on_ranks
from torch import nn

import zshard
from zshard import MixedPrecision


def check_gradients(model, build, run=forward_backward):
    expected = mean_grads(build, run)
    run(model, dist.get_rank())
    ours = {name: near(grad, expected[name]) for name, grad in whole_grads(model).items()}
    assert_same(ours, expected, "the gradients")


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 2)

    def encode(self, x, *, scale=1.0):
        """Uses a parameter of the root, and blocks that are units."""
        for block in self.blocks:
            x = block(x) * self.gain
        return x * scale

    def forward(self, x):
        return self.head(self.encode(x))

    def weigh(self, x):
        """Run a forward, then use a parameter of the root."""
        return self(x).sum() * self.gain.sum() + self.gain.square().sum()

    def fail(self, x):
        raise LookupError("planted")


def registered(combination, **options):
    model = wrapped(Encoder, combination, **options)
    for name in ("encode", "encode", "weigh", "fail"):  # twice has no further effect
        zshard.register_forward_method(model, name)
    return model


def encode_and_learn(model, rank):
    loss_of(model.encode(floats(rank), scale=2.0)).backward()
    loss_of(model(floats(rank, 1))).backward()


def weigh_and_learn(model, rank):
    loss_of(model.weigh(floats(rank))).backward()


@pytest.mark.parametrize("run", [encode_and_learn, weigh_and_learn])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_gradients_through_a_method(combination, run):
    model = registered(combination)
    check_gradients(model, Encoder, run)
    twin = copy.deepcopy(model)
    assert_same(twin.encode(floats(0)), model.encode(floats(0)), "what the copy encodes")


@on_ranks(2)
def test_failing_method_leaves_the_model_unchanged():
    model, plain = registered(("full_shard", None)), make(Encoder)
    zshard.register_forward_method(plain, "encode")  # is ignored
    register = zshard.register_forward_method
    all_refused(
        {
            "fails": (lambda: model.fail(floats(0)), LookupError, "planted"),
            "missing": (lambda: register(model, "no_such"), AttributeError, "no_such"),
        }
    )
    assert_same(model(floats(0)), plain(floats(0)), "the output")
    low = registered(("full_shard", None), mixed_precision=MixedPrecision(torch.bfloat16))
    assert low.encode(floats(0)).dtype == torch.bfloat16, "arguments are cast as in forward"


# --- submodules -----------------------------------------------------------------------------------


class Translator(nn.Module):
    """An encoder whose embedding is the head's weight, and whose blocks are units."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(3000, 9)
            self.blocks = nn.ModuleList(Block(9) for _ in range(3))
            self.norm = nn.LayerNorm(9)

        def forward(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x + torch.zeros(9))  # broadcasts a column of width 1
            return self.norm(x)

    def __init__(self):
        super().__init__()
        self.encoder = Translator.Encoder()
        self.head = nn.Linear(9, 3000, bias=False)
        self.head.weight = self.encoder.embed.weight

    def forward(self, ids):
        return self.head(self.encoder(ids))


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda both: " ".join(both))
@on_ranks(2)
def test_submodule_called_directly_has_full_weights(combination):
    """An embedding so large that each rank has a shard, which it could read."""
    plain, ids = make(Translator), torch.arange(6).reshape(2, 3)
    model = wrapped(Translator, combination)
    with torch.no_grad():
        assert_same(model.encoder(ids), plain.encoder(ids), "the output")
    assert_same(model.encoder(ids), plain.encoder(ids), "the output with gradients")
    loss_of(model(ids)).backward()


# --- results --------------------------------------------------------------------------------------


class Result:
    """Counts accesses to its content."""

    looks = 0

    def __getattribute__(self, name):
        Result.looks += name == "__dict__"
        return super().__getattribute__(name)


class Linked(nn.Module):
    """Returns results that all refer to each other and themselves."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))

    def forward(self, x):
        results = [Result() for _ in range(12)]
        for result in results:
            result.links, result.tensor = results, None
        for result, block in zip(results, self.blocks, strict=False):
            result.tensor = x = block(x)
        return results[0]


def learn_from_links(model, rank):
    result = model(floats(rank))
    loss_of(result.links[0].tensor + result.links[1].tensor).backward()


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_results_with_reference_cycles(combination):
    model = wrapped(Linked, combination)
    Result.looks = 0
    check_gradients(model, Linked, learn_from_links)
    assert Result.looks == 0, "somebody has searched a result"


class Recursive(nn.Module):
    """Calls itself, as a tree does."""

    stop = False

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, depth=3):
        if self.stop:
            raise KeyboardInterrupt
        x = torch.tanh(self.layer(x))
        return x if depth == 0 else self(x, depth - 1)


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_next_call_ends_an_interrupted_forward(combination):
    model = wrapped(Recursive, combination)
    model.stop = True
    for call in (model.module, model, model.module):
        with pytest.raises(KeyboardInterrupt):
            call(floats(0))
    model.stop = False
    check_gradients(model, Recursive)
    assert unit_of(model).n_open == 0
