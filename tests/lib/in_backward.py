"""What the tests of optimizer_in_backward() share: its yardstick, and the models that they train.

The yardstick is the same model, strategy and optimizer with a step() after backward.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from models import COMBINATIONS, loss_of, make_optimizer, wrapped
from models import differences as differences_of
from recomputed import (
    around_parts_of_the_root,
    around_units_and_a_weight_of_the_root,
    leaf,
)
from torch import nn

import zshard
from zshard import FSDP

# With reentrant checkpoints: a weight of the root is used again after its last gradient seemed there.
OF_THE_ROOT = (around_units_and_a_weight_of_the_root, around_parts_of_the_root)
SHARDED = [c for c in COMBINATIONS if c[0] != "no_shard"]
ADAMW = "zshard.AdamW"


def differences(run, build, combination, optimizer=ADAMW, **options):
    """What differs between a model that run(model, optimizer) trains with steps in backward, and
    one that steps after it: names of parameters, and those that kept a .grad."""
    states = []
    for in_backward in (False, True):
        model = wrapped(build, combination, **options)
        made = make_optimizer(optimizer, model)
        if in_backward:
            model.optimizer_in_backward(made)
        run(model, made)
        states.append(model.state_dict())
    kept = [name for name, param in model.named_parameters() if param.grad is not None]
    return differences_of(*states) + [f"{name} has a .grad" for name in kept]


def wrong(run, build, combinations=COMBINATIONS, optimizer=ADAMW, **options):
    """{combination: differences}, where there are any."""
    found = {c: differences(run, build, c, optimizer, **options) for c in combinations}
    return {c: names for c, names in found.items() if names}


def step_after(model, optimizer):
    """What a loop does after backward; with steps in backward there is nothing left to step."""
    optimizer.step()
    optimizer.zero_grad()


def three_steps(model, optimizer):
    for step in range(3):
        loss_of(model(leaf(dist.get_rank(), step))).backward()
        step_after(model, optimizer)


def deep():
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])


def watch(model):
    """A list that gets, before each step of a parameter: how many have a .grad, bytes of slots."""
    seen = []

    def look(_param):
        held = sum(p.grad is not None for p in model.parameters())
        seen.append((held, model.memory()))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(look)
    return seen


class Alone(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = deep()
        self.shift = nn.Parameter(torch.zeros(64))

    def forward(self, x):
        return self.layers(x) + self.shift


def alone(in_backward, optimizer=zshard.AdamW):
    torch.manual_seed(0)
    model = FSDP(Alone(), auto_wrap_policy={nn.Linear})
    made = optimizer(model.parameters(), 1e-2)
    handle = model.optimizer_in_backward(made) if in_backward else None
    return model, made, handle


def batch(step):
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
