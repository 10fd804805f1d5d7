"""Training over NCCL, with fakes of CUDA's driver and libnccl: results, and a rank that dies.

The fakes delay their work and run it on threads of their own, and their GPUs add as the CPU does;
so results are bit-identical to the CPU's only if every wait is in the right place.
test_cuda_path.py has the tests that run over all GPU transports.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from compare import assert_same
from groups import transports_in_use
from nursery import fork_ranks
from stand_ins import environment
from torch import nn

import zshard
from zshard import FSDP

STRATEGIES = ["full_shard", "shard_grad_op", "no_shard", "zero1"]
WORLDS = [("nccl", 2, "shm"), ("nccl", 2, "c10d"), ("nccl", 3, "c10d")]


def make_model(width: int = 33) -> nn.Module:
    torch.manual_seed(7)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, nn.BatchNorm1d(width), nn.Linear(width, 5))


def wrapped(transport: str, **options):
    return FSDP(
        make_model(),
        transport=transport,
        auto_wrap_policy=zshard.wrap.ModuleWrapPolicy({nn.Linear}),
        **options,
    )


def steps(model, optimizer, count):
    """Return the losses of that many steps; each rank has batches of its own."""
    rank, losses = torch.distributed.get_rank(), []
    for step in range(count):
        torch.manual_seed(100 * step + rank)
        loss = model(torch.randn(4, 33)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def train(env, transport, strategy):
    """Return losses, full parameters, and the transports, of two models one after the other."""
    os.environ.update(env)
    losses = []
    for _ in range(2):  # the first one's memory is freed while the second trains
        model = wrapped(transport, sharding_strategy=strategy)
        losses += steps(model, zshard.AdamW(model.parameters(), lr=0.01), 3)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, state, transports_in_use()


@pytest.mark.sampled(2)
@pytest.mark.needs_fma
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("backend", "world", "transport"), WORLDS)
def test_training_is_bit_identical_to_the_cpu(backend, world, transport, strategy):
    plain = fork_ranks(train, world, {}, transport, strategy, check=True)
    ours = fork_ranks(train, world, environment(backend), transport, strategy, check=True)
    for mine, cpu in zip(ours, plain, strict=True):
        losses, state, transports = mine.value
        assert backend in transports and backend not in cpu.value[2]
        assert losses == cpu.value[0]
        assert_same(state, cpu.value[1], f"the state of rank {mine.rank}")


def die_in_training(env, transport):
    """The last rank is killed between forward and backward; return how the others end, and when."""
    os.environ.update(env)
    model = wrapped(transport)
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
@pytest.mark.parametrize(("backend", "transport"), [("nccl", "c10d"), ("nccl", "shm")])
def test_killed_rank_is_an_error_within_seconds(backend, transport, world):
    *survivors, killed = fork_ranks(die_in_training, world, environment(backend), transport)
    assert killed.returncode == -signal.SIGKILL
    for result in survivors:
        kind, words, seconds = result.value
        assert kind == "PeerError" and f"rank {world - 1}" in words, (kind, words)
        assert seconds < 30
