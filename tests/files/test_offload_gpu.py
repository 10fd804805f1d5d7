"""Offload from a GPU to its host's memory, over stand-ins for CUDA: the same bits, and less there.

What is offloaded is a tensor like any other, only its memory lies elsewhere; so
training with and without is compared to the bit.
"""

import os

import pytest
import stand_ins
import torch
from compare import assert_same
from nursery import fork_ranks
from torch import nn

import zshard
from zshard import FSDP

ALL = zshard.Offload(grads=True)
HALF_OF_THE_STATE = zshard.Offload(params=False, fraction=0.5)
BF16 = zshard.MixedPrecision(torch.bfloat16)
CASES = {
    "full_shard": {},
    "bf16": {"mixed_precision": BF16},
    "zero1": {"strategy": "zero1"},
    "no_shard": {"strategy": "no_shard"},
}


def trained(options, offload, in_backward):
    """Losses, parameters and memory after some steps."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(32, 3))
    model = FSDP(model, auto_wrap_policy={nn.Linear}, offload=offload, **options)
    optimizer = zshard.AdamW(model.parameters(), lr=0.01)
    if in_backward:
        model.optimizer_in_backward(optimizer)
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    losses = []
    for _ in range(4):
        loss = model(torch.randn(8, 32, generator=generator)).square().mean()
        loss.backward()
        if not in_backward:
            model.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, state, model.memory(), model.memory("predicted")


def trained_three_ways(env, options, in_backward):
    """Without offload, with all and with some."""
    os.environ.update(env)
    return [trained(options, offload, in_backward) for offload in (None, ALL, HALF_OF_THE_STATE)]


def check_same(one, other):
    assert one[0] == other[0]
    assert_same(one[1], other[1], "the state")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("in_backward", [False, True], ids=["step", "in backward"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("world", "backend"), [(1, "c10d"), (2, "c10d"), (2, "nccl")])
def test_the_bits_are_those_without(world, backend, case, in_backward):
    env, options = stand_ins.environment(backend), CASES[case]
    for rank in fork_ranks(trained_three_ways, world, env, options, in_backward, check=True):
        usual, moved, partly = rank.value
        check_same(usual, moved)
        check_same(usual, partly)
        before, after, predicted = usual[2], moved[2], moved[3]
        assert before["offloaded"] == 0 < partly[2]["offloaded"] < after["offloaded"]
        assert after["shards"] == after["grads"] == after["optimizer"] == 0
        assert after["total"] < before["total"]
        assert abs(after["offloaded"] - predicted["offloaded"]) < 0.02 * predicted["offloaded"]


def refused(env):
    os.environ.update(env)
    try:
        FSDP(nn.Linear(3, 3), offload="/tmp")
    except NotImplementedError as error:
        return str(error)
    return ""


def test_files_are_for_the_cpu():
    (result,) = fork_ranks(refused, 1, stand_ins.environment(), check=True)
    assert "on a GPU: omit directory" in result.value
