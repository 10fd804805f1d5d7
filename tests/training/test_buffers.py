"""Buffers, broadcast from rank 0 at the start of each forward or left local, as under DDP.

The script replaces, adds and removes buffers between steps.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import COMBINATIONS, ddp
from rows import all_refused
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP


class Replacing(nn.Module):
    """A running mean by assignment, beside a batch norm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.last = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        x = self.first(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.last(x - self.mean)


def batch(step, rank):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def swap_buffers(inner, step):
    """Lightning's averages of weights replace those of batch norms; others come and go."""
    if step == 1:
        norm = inner.first[1]
        norm.running_mean = norm.running_mean + dist.get_rank()
    if step == 2:
        inner.register_buffer("late", torch.full((2,), float(dist.get_rank())))
    if step == 4:
        del inner.late


def states_of(model, inner, accumulate):
    """Return this rank's buffers after each forward."""
    optimizer = torch.optim.SGD(inner.parameters(), 0.1)
    states = []
    for step in range(6):
        swap_buffers(inner, step)
        within = accumulate and step % 2 == 0
        with model.no_sync() if within else contextlib.nullcontext():
            model(batch(step, dist.get_rank())).square().sum().backward()
        states.append({name: each.clone() for name, each in inner.named_buffers()})
        if not within:
            optimizer.step()
            optimizer.zero_grad()
    return states


@pytest.mark.sampled(4)
@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize(
    ("sync", "accumulate"),
    [("training", True), ("training", False), (True, False), ("ddp", False), (False, True)],
)
@on_ranks(2)
def test_buffers_match_ddp(combination, sync, accumulate):
    strategy, transport = combination
    plain = Replacing()
    theirs = states_of(ddp(plain, sync_buffers=bool(sync)), plain, accumulate)
    if sync == "ddp":
        model = zshard.DistributedDataParallel(Replacing(), transport=transport)
    else:
        options = {"transport": transport, "auto_wrap_policy": {nn.Linear}}
        model = FSDP(Replacing(), strategy=strategy, forward_sync_buffers=sync, **options)
    assert_same(states_of(model, model, accumulate), theirs, "the buffers")
    before = [buffer.clone() for buffer in model.buffers()]
    assert_same(model.state_dict(), plain.state_dict(), "the state")
    assert_same(model.buffers(), before, "the buffers after state_dict()")


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@on_ranks(2)
def test_one_rank_evaluates_alone(strategy):
    """Rank 0 alone evaluates over shm, and trains on with the others."""
    options = {"strategy": strategy, "transport": "shm", "timeout": 20}
    model = FSDP(Replacing(), forward_sync_buffers="training", **options)
    plain = Replacing()
    parallel = ddp(plain, sync_buffers=True)
    for step in range(3):
        for each in (model, parallel):
            each(batch(step, dist.get_rank())).square().sum().backward()
        if dist.get_rank() == 0:
            with torch.no_grad():
                ours, theirs = (each.eval()(batch(9, 0)) for each in (model, plain))
            assert_same(ours, theirs, "rank 0's evaluation")
            model.train()
            plain.train()
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()), "the buffers")


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_copy_broadcasts_its_own_buffers(transport):
    """A deepcopy of the model broadcasts its own buffers; the original keeps its own."""
    model = FSDP(Replacing(), transport=transport, forward_sync_buffers="training")
    twin = copy.deepcopy(model)
    twin.mean = torch.full((4,), float(dist.get_rank()))
    twin(batch(0, 0)).sum().backward()
    assert_same(model.mean, torch.zeros(4), "the original's buffer")
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, twin.mean.clone())
    assert_same(everyone[0], everyone[1], "the copy's buffer")


def test_invalid_argument_is_refused():
    call = lambda: FSDP(Replacing(), forward_sync_buffers="eval")  # noqa: E731
    text = "one of False, True, 'training', got 'eval'"
    all_refused({"a word of no meaning": (call, ValueError, text)})
