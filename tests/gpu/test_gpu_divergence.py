"""Ranks that run modules in other orders over GPUs: the error names the first transfer that differs.

What a rank queued last says little, as it is often the same on all ranks by then.
"""

from __future__ import annotations

import os
import re

import pytest
import stand_ins
import torch
from nursery import fork_ranks
from torch import nn

import zshard
from zshard import FSDP

BACKENDS = ["nccl", "c10d"]
BYTES = r"\(\d+ bytes per rank\)"


class Net(nn.Module):
    """Rank 1 may run its layers in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, turned):
        if turned and os.environ["RANK"] == "1":
            return self.third(self.first(self.second(x)))
        return self.third(self.second(self.first(x)))


def run(env, step):
    """What is raised where rank 1 goes another way in a step."""
    os.environ.update(env)
    policy = zshard.wrap.ModuleWrapPolicy({nn.Linear})
    model = FSDP(Net(), auto_wrap_policy=policy, timeout=30, transport="c10d")
    try:
        for i in range(step + 1):
            loss = model(torch.ones(2, 8), i == step).square().mean()
            loss.backward()
            model.zero_grad()
    except zshard.DivergenceError as error:
        return str(error)
    return "nothing"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_divergence_names_the_first_transfer(backend, step, world):
    env = stand_ins.environment(backend)
    found = fork_ranks(run, world, env, step, check=True)
    number = "1" if step == 0 else r"\d+"
    words = rf"ranks diverged: transfer {number} is parameters of unit 'first' {BYTES} on rank 0, "
    words += rf"but parameters of unit 'second' {BYTES} on rank 1; run the same modules"
    for result in found:
        assert re.search(words, result.value), result.value
