"""Training over NCCL, with stand-ins for CUDA's driver and for libnccl: the numbers, and a rank that dies.

The one idea: both stand-ins work late and on threads of their own, and their GPUs add as the CPU
does; so training over them gives the CPU's bits only if every wait is where it has to be.
"""

import os
import signal
import time

import pytest
import stand_ins as stand_in
import torch
from nursery import fork_ranks
from torch import nn

import zshard
from zshard import FSDP, _group

STEPS = 3


@pytest.fixture(scope="module")
def stand_ins():
    """The environment in which a CPU has GPUs and NCCL."""
    return stand_in.environment("nccl")


def make_model():
    torch.manual_seed(7)
    layers = [nn.Sequential(nn.Linear(33, 33), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(33, 5))


def train(env, options):
    """The losses and the parameters after some steps; what the transport was."""
    os.environ.update(env)
    model = FSDP(
        make_model(), auto_wrap_policy=zshard.wrap.ModuleWrapPolicy({nn.Linear}), **options
    )
    optimizer = zshard.AdamW(model.parameters(), lr=0.01)
    rank = torch.distributed.get_rank()
    losses = []
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        loss = model(torch.randn(4, 33)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    transport = {entry.comm.transport for entry in _group._entries.values()}
    return losses, {name: value.clone() for name, value in model.state_dict().items()}, transport


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("world", [2, 3])
def test_training_has_the_bits_of_the_cpu(stand_ins, strategy, world):
    options = {"sharding_strategy": strategy, "transport": "c10d"}
    plain = fork_ranks(train, world, {}, options, check=True)
    ours = fork_ranks(train, world, stand_ins, options, check=True)
    for mine, cpu in zip(ours, plain, strict=True):
        losses, state, transport = mine.value
        assert "nccl" in transport and "nccl" not in cpu.value[2]
        assert losses == cpu.value[0]
        for name, value in cpu.value[1].items():
            assert torch.equal(state[name], value), name


def die_in_training(env):
    """The last rank is killed between forward and backward; how the others end, and when."""
    os.environ.update(env)
    model = FSDP(make_model(), transport="c10d")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model(torch.randn(4, 33)).square().mean().backward()
    loss = model(torch.randn(4, 33)).square().mean()
    start = time.monotonic()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        loss.backward()
        model(torch.randn(4, 33))
    except (zshard.PeerError, RuntimeError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "nothing", "", time.monotonic() - start


@pytest.mark.parametrize("world", [2, 3])
def test_killed_rank_is_an_error_within_seconds(stand_ins, world):
    *survivors, killed = fork_ranks(die_in_training, world, stand_ins)
    assert killed.returncode == -signal.SIGKILL
    for result in survivors:
        kind, words, seconds = result.value
        assert kind == "PeerError" and f"rank {world - 1}" in words, (kind, words)
        assert seconds < 30
