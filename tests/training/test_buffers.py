"""Buffers, broadcast from rank 0 at the start of each forward or left local, as under DDP.

The script replaces, adds and removes buffers between steps.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import COMBINATIONS, ddp
from scenarios import message_of
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP


class Replacing(nn.Module):
    """A running mean by assignment, beside a batch norm."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.last = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        y: torch.Tensor = self.last(x - self.mean)
        return y


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def swap_buffers(inner: Any, step: int) -> None:
    """Lightning's averages of weights replace those of batch norms; others come and go."""
    if step == 1:
        norm = inner.first[1]
        norm.running_mean = norm.running_mean + dist.get_rank()
    if step == 2:
        inner.register_buffer("late", torch.full((2,), float(dist.get_rank())))
    if step == 4:
        del inner.late


def states_of(model: Any, inner: Any, accumulate: bool) -> list[dict[str, torch.Tensor]]:
    """This rank's buffers after each forward."""
    optimizer = torch.optim.SGD(inner.parameters(), 0.1)
    found = []
    for step in range(6):
        swap_buffers(inner, step)
        within = accumulate and step % 2 == 0
        with model.no_sync() if within else contextlib.nullcontext():
            model(batch(step, dist.get_rank())).square().sum().backward()
        found.append({name: each.clone() for name, each in inner.named_buffers()})
        if not within:
            optimizer.step()
            optimizer.zero_grad()
    return found


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
        model: Any = zshard.DistributedDataParallel(Replacing(), transport=transport)
    else:
        options: Any = {
            "strategy": strategy,
            "transport": transport,
            "auto_wrap_policy": {nn.Linear},
        }
        model = FSDP(Replacing(), forward_sync_buffers=sync, **options)
    ours = states_of(model, model, accumulate)
    assert_same(ours, theirs, "the buffers")
    assert_same(model.state_dict(), plain.state_dict(), "the state")


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@on_ranks(2)
def test_one_rank_evaluates_alone(strategy):
    """Rank 0 alone evaluates over shm, and trains on with the others."""
    options: Any = {"strategy": strategy, "transport": "shm", "timeout": 20}
    model: Any = FSDP(Replacing(), forward_sync_buffers="training", **options)
    plain = Replacing()
    parallel = ddp(plain, sync_buffers=True)
    for step in range(3):
        for each in (model, parallel):
            each(batch(step, dist.get_rank())).square().sum().backward()
        if dist.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                ours = model(batch(9, 0))
            model.train()
            plain.eval()
            assert_same(ours, plain(batch(9, 0)), "rank 0's evaluation")
            plain.train()
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()), "the result")


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_copy_broadcasts_its_own_buffers(transport):
    """A deepcopy of the model broadcasts its own buffers; the original keeps its own."""
    import copy

    model: Any = FSDP(Replacing(), transport=transport, forward_sync_buffers="training")
    made = copy.deepcopy(model)
    made.mean = torch.full((4,), float(dist.get_rank()))
    made(batch(0, 0)).sum().backward()
    assert_same(model.mean, torch.zeros(4), "the original's buffer")
    said = message_of(lambda: FSDP(Replacing(), forward_sync_buffers="eval"), ValueError)  # type: ignore[arg-type]
    assert "one of False, True, 'training', got 'eval'" in said
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, made.mean.clone())
    assert_same(everyone[0], everyone[1], "the copy's buffer")
