"""zero.Init() around models whose modules have no reset_parameters(), such as those of
transformers.

A model's `_init_weights(module)` gives values as it does for the plain model. Tensors that it omits
may be loaded; otherwise the first forward names them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from engines import config
from scenarios import message_of
from spawn import on_ranks
from torch import Tensor, nn

import zshard
from zshard import deepspeed


class Scale(nn.Module):
    """A module without reset_parameters()."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ModuleList([Scale(300), Scale(300)])
        self.down = nn.Linear(300, 300)
        self.last = Scale(300)

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = self.down(scale(x))
        x = self.last(x)
        return x


class Initializes(Body):
    """As in transformers' models: modules one by one, and the contents of a module without
    tensors."""

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.last:
            nn.init.zeros_(module.weight)
        elif isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)
        elif isinstance(module, nn.ModuleList):
            nn.init.constant_(module[0].weight, 2.0)
            nn.init.constant_(module[1].weight, 4.0)


class TakesNone(Body):
    def _init_weights(self) -> None:
        raise AssertionError("it takes no module")


def initialized(build: Callable[[], nn.Module], stage: int = 3) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with deepspeed.zero.Init():
            model = build()
        changes = {"zero_optimization": {"stage": stage}, "optimizer": {"type": "SGD"}}
        return zshard.initialize(model=model, config=config(**changes))[0]


@pytest.mark.parametrize("stage", (3, 0))
@on_ranks(2)
def test_init_weights_initializes_modules_and_contents(stage):
    model = initialized(Initializes, stage).module.state_dict()
    model.pop("down.bias")  # random
    numbers = {"scales.0": 2.0, "scales.1": 4.0, "last": 0.0}
    wanted = {f"{name}.weight": torch.full((300,), each) for name, each in numbers.items()}
    assert_same(model, {**wanted, "down.weight": torch.full((300, 300), 0.5)}, "the weights")


@pytest.mark.parametrize("build", (Body, TakesNone))
@on_ranks(2)
def test_uninitialized_tensors_are_named_or_loaded(build):
    engine, plain, x = initialized(build), Body(), torch.ones(2, 300)
    text = message_of(lambda: engine(x), RuntimeError)  # one rank has no elements of it
    assert "'scales.0.weight' was on the meta device" in text and "load a state dict" in text
    state = plain.state_dict()
    for value in state.values():
        dist.broadcast(value, 0)
    engine.module.load_state_dict(state)
    plain.load_state_dict(state)
    engine.backward(engine(x).mean())
    assert_same(engine(x), plain(x), "the output")


def llama() -> nn.Module:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@on_ranks(2)
def test_llama_matches_transformers():
    """With its rotary frequencies, which no state dict contains."""
    torch.manual_seed(0)
    engine, plain = initialized(llama), llama()
    state = engine.module.state_dict()
    assert 0.015 < state["model.layers.0.mlp.up_proj.weight"].std() < 0.025
    assert state["model.norm.weight"].std() == 0
    ids = torch.arange(20).view(2, 10)
    plain.load_state_dict(state)
    assert_same(engine(input_ids=ids).logits, plain(input_ids=ids).logits, "the output")
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
