"""Clipping and unscaling later is doing so at once, whatever else a script does, in any order."""

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


class Acts:
    """A model and its optimizers; each method does one thing that a script may do, by a number."""

    def __init__(self, combination):
        torch.manual_seed(3)
        self.model = wrapped(Branches, combination, auto_wrap_policy={nn.Linear})
        self.params = list(self.model.parameters())
        self.adamw = zshard.AdamW(self.params, lr=1e-2)
        self.sgd = torch.optim.SGD(self.params, lr=1e-2, momentum=0.9)

    def grads(self):
        return [param.grad for param in self.params if param.grad is not None]

    def backward(self, number):
        generator = torch.Generator().manual_seed(number + dist.get_rank())
        inputs = torch.randn(5, 40, generator=generator)
        self.model(inputs, number % 3 > 0).square().mean().backward()

    def accumulate(self, number):
        with self.model.no_sync():
            self.backward(number)
        self.backward(1)

    def clip(self, number):
        return nn.utils.clip_grad_norm_(self.params, 0.05)

    def clip_some(self, number):
        return nn.utils.clip_grad_norm_(self.params[number % 5 :], 0.05)

    def norm(self, number):
        return nn.utils.get_total_norm(self.grads())

    def unscale(self, number):
        scaler = torch.amp.GradScaler("cpu", init_scale=[2.0, 1.5, 0.5, 4.0][number % 4])
        scaler.scale(torch.ones(()))
        if self.grads():
            scaler.unscale_(self.sgd)
        return scaler._found_inf_per_device(self.sgd)

    def step(self, number):
        self.adamw.step()

    def step_sgd(self, number):
        self.sgd.step()

    def zero(self, number):
        self.model.zero_grad(set_to_none=number % 2 == 0)

    def scale(self, number):
        for grad in self.grads()[number % 3 :]:
            (grad if number % 2 else grad.data).mul_(1.5)

    def drop(self, number):
        self.params[number % len(self.params)].grad = None

    def replace(self, number):
        param = self.params[number % len(self.params)]
        if param.grad is not None:
            param.grad = param.grad * 1.25


def outcome(act, number):
    """Return its result, or the beginning of its error: of clipping a .grad that was replaced."""
    try:
        return act(number)
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
    names = [name for name in vars(Acts) if not name.startswith("_") and name != "grads"]
    later, at_once = Acts(combination), Acts(combination)
    done = []
    for _ in range(25):
        name, number = chance.choice([*names, "backward", "clip"]), chance.randrange(1000)
        done.append((name, number))
        ours = outcome(getattr(later, name), number)
        aliases = [grad.to_local() for grad in at_once.grads()]
        expected = outcome(getattr(at_once, name), number)
        del aliases
        assert_same([ours], [expected], f"{name} after {done}", nans=True)
        assert_same(later.params, at_once.params, f"parameters after {done}", nans=True)
    grads = later.grads(), at_once.grads()
    assert_same(*grads, f"gradients after {done}", nans=True)
