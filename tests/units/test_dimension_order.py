"""Parameters with another dimension order in memory: channels_last, transposed.

Forward kernels see strides, so a forward is bit-identical to DDP's if it sees the strides from
before wrapping. Shards, state dicts and files are row-major in any case.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from compare import differences
from groups import mesh_of
from models import Conv, ddp, loss_of, make
from spawn import on_ranks
from test_plan import differences as differences_from_plan
from torch import nn

import zshard
from zshard import FSDP

SEEN: dict[str, tuple[int, ...]] = {}


class Seeing(nn.Module):
    """Records the strides that a forward sees; transposed weights, and a convolution of one
    pixel."""

    def __init__(self):
        super().__init__()
        self.point, self.conv = nn.Conv2d(3, 3, 1), Conv()
        self.conv.head.weight = nn.Parameter(torch.randn(5, 3).t())

    def forward(self, x):
        SEEN.update({name: param.stride() for name, param in self.named_parameters()})
        return self.conv(self.point(x))


class Case:
    @staticmethod
    def batch(step, rank):
        return torch.randn(4, 3, 7, 7, generator=torch.Generator().manual_seed(10 * step + rank))


def last():
    return make(Seeing).to(memory_format=torch.channels_last)


def run(model, optimizer):
    """Return losses of steps, one of them with accumulation, and an evaluation's result."""
    rank, found = dist.get_rank(), []
    for step in range(3):
        optimizer.zero_grad()
        if step == 1:
            with model.no_sync():
                loss_of(model(Case.batch(7, rank))).backward()
        loss = loss_of(model(Case.batch(step, rank)))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    with torch.no_grad():
        return [*found, model.eval()(Case.batch(9, rank)).sum().item()]


STRATEGIES = ("full_shard", "shard_grad_op", "zero1", "no_shard", "hybrid_shard", "hybrid_full")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_forward_sees_the_plain_models_strides(strategy, transport):
    """Return what differs from DDP, in numbers and in strides, with a policy and without."""
    plain = last()
    reference = ddp(plain)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.1)
    losses = run(reference, theirs)
    strides = {name: param.stride() for name, param in plain.named_parameters()}
    options = {"device_mesh": mesh_of(1, 2)} if strategy.startswith("hybrid") else {}
    model = FSDP(last(), strategy=strategy, transport=transport, auto_wrap_policy=None, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = differences(run(model, optimizer), losses) + differences(SEEN, strides)
    # BatchNorm's buffers are each rank's own in both
    found += differences(model.state_dict(), plain.state_dict())
    for n, state in optimizer.state_dict()["state"].items():
        found += differences(state, theirs.state_dict()["state"][n])
    with FSDP.summon_full_params(model):
        found += differences({n: p.stride() for n, p in model.named_parameters()}, strides)
        with torch.no_grad():
            model.conv.stages[0][0].weight[:, 1] *= 2
            plain.conv.stages[0][0].weight[:, 1] *= 2
    found += differences(model.state_dict(), plain.state_dict())
    model.load_state_dict(last().state_dict())
    assert found + differences(model.state_dict(), last().state_dict()) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("precision", [None, zshard.MixedPrecision(torch.bfloat16)], ids=str)
@on_ranks(2)
def test_predicted_slots(transport, precision):
    model = FSDP(
        last(),
        transport=transport,
        auto_wrap_policy={nn.Conv2d},
        mixed_precision=precision,
    )
    assert differences_from_plan(model, Case, steps=3) == []
