"""Calls that do not enter through the model's forward.

Registered methods gather and reduce as forward does. A submodule that a script calls directly, as
generate() does with an encoder, may use weights of a unit above it; these are then unsharded, since
an embedding would silently read wrong rows of a shard.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import COMBINATIONS, Block, loss_of, make
from scenarios import WIDTH, floats, mean_grads, message_of, near, whole_grads
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, MixedPrecision


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


def encode_and_learn(model, rank):
    loss_of(model.encode(floats(rank), scale=2.0)).backward()
    loss_of(model(floats(rank, 1))).backward()


def wrapped(combination, **options):
    strategy, transport = combination
    model = FSDP(make(Encoder), strategy=strategy, transport=transport, **options)
    zshard.register_forward_method(model, "encode")
    zshard.register_forward_method(model, "encode")  # registering twice has no further effect
    return model


def check_gradients(model, run):
    expected = mean_grads(Encoder, run)
    run(model, dist.get_rank())
    ours = {name: near(grad, expected[name]) for name, grad in whole_grads(model).items()}
    assert_same(ours, expected, "the gradients")


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_gradients_through_a_method(combination):
    model = wrapped(combination)
    check_gradients(model, encode_and_learn)
    twin = copy.deepcopy(model)
    assert_same(twin.encode(floats(0)), model.encode(floats(0)), "what the copy encodes")


def weigh_and_learn(model, rank):
    loss_of(model.weigh(floats(rank))).backward()


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_method_may_run_the_forward(combination):
    model = wrapped(combination)
    zshard.register_forward_method(model, "weigh")
    check_gradients(model, weigh_and_learn)


@on_ranks(2)
def test_failing_method_leaves_the_model_unchanged():
    """A method that raises leaves the model unchanged; plain modules are ignored."""
    model, plain = FSDP(make(Encoder)), make(Encoder)
    zshard.register_forward_method(model, "fail")
    raised = message_of(lambda: model.fail(floats(0)), LookupError)
    zshard.register_forward_method(plain, "encode")
    message_of(lambda: zshard.register_forward_method(model, "no_such"), AttributeError)
    assert_same(model(floats(0)), plain(floats(0)), "the output")
    assert raised == "planted"


@on_ranks(2)
def test_arguments_are_cast_as_in_forward():
    model = wrapped(("full_shard", None), mixed_precision=MixedPrecision(torch.bfloat16))
    assert model.encode(floats(0)).dtype == torch.bfloat16


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
    model = FSDP(make(Translator), strategy=combination[0], transport=combination[1])
    with torch.no_grad():
        assert_same(model.encoder(ids), plain.encoder(ids), "the output")
    assert_same(model.encoder(ids), plain.encoder(ids), "the output with gradients")
    loss_of(model(ids)).backward()
