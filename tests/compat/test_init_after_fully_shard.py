"""FSDP2's order: meta device, fully_shard(), to_empty(), and the script's own initialization.

The same function builds a plain model and a sharded one after the same seed, with no other
difference; both must have the same values and leave the same random state.
"""

from __future__ import annotations

import copy

import pytest
import torch
from compare import assert_same
from models import TRANSPORTS
from scenarios import message_of
from spawn import on_ranks
from torch import nn

from zshard import FSDP, fully_shard

WIDTH, WORDS = 12, 17


class Scale(nn.Module):
    """No initialization covers this parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x):
        return x * self.weight


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Scale()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def init_weights(self, std):
        nn.init.ones_(self.norm.weight)
        self.up.reset_parameters()
        nn.init.trunc_normal_(self.down.weight, mean=0.0, std=std)


class Decoder(nn.Module):
    """As in torchtitan: a buffer that the constructor computes, tied weights, and its own
    parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=2)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = Scale()
        self.mix = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("angles", self.computed_angles(), persistent=False)

    @staticmethod
    def computed_angles():
        return torch.arange(WIDTH) / 3

    def forward(self, ids):
        x = (self.embed(ids) + self.angles) @ self.mix
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def init_weights(self):
        self.angles = self.computed_angles()
        nn.init.normal_(self.embed.weight)
        for number, layer in enumerate(self.layers):
            layer.init_weights(0.02 / (number + 1))
        nn.init.ones_(self.norm.weight)
        nn.init.xavier_normal_(self.mix)
        nn.init.trunc_normal_(self.head.weight, std=WIDTH**-0.5)
        with torch.no_grad():
            self.embed.weight[2].fill_(0.0)


def on_meta(seed=7):
    torch.manual_seed(seed)
    with torch.device("meta"):
        return Decoder()


def shard(model, **options):
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def plain_decoder():
    model = on_meta().to_empty(device="cpu")
    model.head.weight = model.embed.weight  # to_empty() of a plain module unties it
    model.init_weights()
    return model


IDS = torch.arange(6).view(2, 3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_values_equal_the_plain_model(transport, keep):
    plain = plain_decoder()
    state = torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZSHARD_TRANSPORT", transport)
        model = shard(on_meta(), reshard_after_forward=not keep)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    assert_same(torch.get_rng_state(), state, "the random state")
    assert_same(model.angles, plain.angles, "the buffer")
    assert_same(model(IDS), plain(IDS), "the output")
    model(IDS).sum().backward()
    assert_same(copy.deepcopy(model).state_dict(), plain.state_dict(), "the copy")
    assert_same(model.state_dict(), plain.state_dict(), "the state")


@on_ranks(2)
def test_within_summon_full_params():
    plain, model = plain_decoder(), shard(on_meta())
    model.to_empty(device="cpu")
    with FSDP.summon_full_params(model, writeback=True):
        model.init_weights()
    assert_same(model.state_dict(), plain.state_dict(), "the state")


@on_ranks(2)
def test_only_layers_sharded():
    """The outermost module is not sharded, so to_empty() is torch's own."""
    models = []
    for sharded in (False, True):
        torch.manual_seed(7)
        with torch.device("meta"):
            model = nn.Sequential(Layer(), Layer())
        for layer in model if sharded else ():
            fully_shard(layer)
        model.to_empty(device="cpu")
        torch.manual_seed(8)
        for layer in model:
            layer.init_weights(0.02)
        models.append([model(torch.ones(2, WIDTH)), *(layer.state_dict() for layer in model)])
    assert_same(models[1], models[0], "the model")


class Forgotten(nn.Module):
    """All ranks have elements of the parameter."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.empty(64, 64))
        self.register_buffer("angles", torch.empty(64))

    def forward(self, x):
        return (x + self.angles) @ self.mix


@pytest.mark.parametrize("name", ["mix", "angles"])
@on_ranks(2)
def test_first_forward_names_uninitialized_tensors(name):
    with torch.device("meta"):
        model = Forgotten()
    fully_shard(model).to_empty(device="cpu")
    nn.init.ones_(model.angles if name == "mix" else model.mix)
    text = message_of(lambda: model(torch.ones(1, 64)), RuntimeError)
    assert f"'{name}' was on the meta device" in text and "load a state dict" in text
    nn.init.ones_(getattr(model, name))
    assert float(model(torch.ones(1, 64))[0, 0].detach()) == 128.0
    copy.deepcopy(model)(torch.ones(1, 64)).sum().backward()
    assert len(model._forward_pre_hooks) == 1
