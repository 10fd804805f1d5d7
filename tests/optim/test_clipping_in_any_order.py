"""Deferred clipping and unscaling equal immediate ones, no matter what else a script does, in any
order."""

import random

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import COMBINATIONS, wrapped
from spawn import on_ranks
from torch import nn

import zshard

SHARDED = [each for each in COMBINATIONS if each[0] != "no_shard"]


class Branches(nn.Module):
    """Units of several shards; one takes part in some forwards only."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(40, 150), nn.Linear(150, 70)
        self.rare = nn.Linear(70, 70)

    def forward(self, inputs, rarely):
        hidden = self.second(torch.relu(self.first(inputs)))
        return self.rare(hidden) if rarely else hidden


class Script:
    """A model and its optimizers."""

    def __init__(self, combination):
        torch.manual_seed(3)
        self.model = wrapped(Branches, combination, auto_wrap_policy={nn.Linear})
        self.params = list(self.model.parameters())
        self.adamw = zshard.AdamW(self.params, lr=1e-2)
        self.sgd = torch.optim.SGD(self.params, lr=1e-2, momentum=0.9)

    def grads(self):
        return [param.grad for param in self.params if param.grad is not None]


def backward(script, number):
    generator = torch.Generator().manual_seed(number + dist.get_rank())
    inputs = torch.randn(5, 40, generator=generator)
    script.model(inputs, number % 3 > 0).square().mean().backward()


def accumulate(script, number):
    with script.model.no_sync():
        backward(script, number)
    backward(script, 1)


def unscale(script, number):
    scaler = torch.amp.GradScaler("cpu", init_scale=[2.0, 1.5, 0.5, 4.0][number % 4])
    scaler.scale(torch.ones(()))
    if script.grads():
        scaler.unscale_(script.sgd)
    return scaler._found_inf_per_device(script.sgd)


def scale(script, number):
    for grad in script.grads()[number % 3 :]:
        (grad if number % 2 else grad.data).mul_(1.5)


def replace(script, number):
    param = script.params[number % len(script.params)]
    if param.grad is not None:
        param.grad = param.grad * 1.25


ACTS = {  # operations of a script, by number
    "backward": backward,
    "accumulate": accumulate,
    "clip": lambda script, number: nn.utils.clip_grad_norm_(script.params, 0.05),
    "clip some": lambda script, n: nn.utils.clip_grad_norm_(script.params[n % 5 :], 0.05),
    "norm": lambda script, number: nn.utils.get_total_norm(script.grads()),
    "unscale": unscale,
    "step": lambda script, number: script.adamw.step(),
    "step of SGD": lambda script, number: script.sgd.step(),
    "zero": lambda script, number: script.model.zero_grad(set_to_none=number % 2 == 0),
    "scale": scale,
    "drop": lambda script, n: setattr(script.params[n % len(script.params)], "grad", None),
    "replace": replace,
}


def outcome(name, script, number):
    """Return its result, or the beginning of its error: of clipping a .grad that was replaced."""
    try:
        return ACTS[name](script, number)
    except RuntimeError as error:
        return str(error)[:60]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("combination", SHARDED)
@pytest.mark.parametrize("seed", range(8))
@on_ranks(2)
def test_clipping_later_is_clipping_at_once(combination, seed):
    """Run the same acts on two models. One has a second name for its gradients, so that they are
    clipped at once."""
    chance = random.Random(seed)
    later, at_once = Script(combination), Script(combination)
    done = []
    for _ in range(25):
        name, number = chance.choice([*ACTS, "backward", "clip"]), chance.randrange(1000)
        done.append((name, number))
        ours = outcome(name, later, number)
        aliases = [grad.to_local() for grad in at_once.grads()]
        expected = outcome(name, at_once, number)
        del aliases
        assert_same([ours], [expected], f"{name} after {done}", nans=True)
        assert_same(later.params, at_once.params, f"parameters after {done}", nans=True)
    grads = later.grads(), at_once.grads()
    assert_same(*grads, f"gradients after {done}", nans=True)
