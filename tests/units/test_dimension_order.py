"""Parameters with another dimension order in memory: channels_last, transposed.

Forward kernels see strides, so a forward is bit-identical to DDP's if it sees the strides from
before wrapping. Shards, state dicts and files are row-major in any case.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import mesh_of
from models import Case, Conv, ddp, loss_of, make
from spawn import on_ranks
from test_plan import check_plan
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


def last():
    return make(Seeing).to(memory_format=torch.channels_last)


CASE = Case(last, lambda generator: torch.randn(4, 3, 7, 7, generator=generator))


def run(model, optimizer):
    """Return losses of steps, one of them with accumulation, and an evaluation's result."""
    rank, results = dist.get_rank(), []
    for step in range(3):
        optimizer.zero_grad()
        if step == 1:
            with model.no_sync():
                loss_of(model(CASE.batch(7, rank))).backward()
        loss = loss_of(model(CASE.batch(step, rank)))
        loss.backward()
        optimizer.step()
        results.append(loss.item())
    with torch.no_grad():
        return [*results, model.eval()(CASE.batch(9, rank)).sum().item()]


STRATEGIES = ("full_shard", "shard_grad_op", "zero1", "no_shard", "hybrid_shard", "hybrid_full")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_forward_sees_the_plain_models_strides(strategy, transport):
    """Numbers, strides and the optimizer's state are DDP's."""
    plain = last()
    reference = ddp(plain)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.1)
    losses = run(reference, theirs)
    strides = {name: param.stride() for name, param in plain.named_parameters()}
    options = {"device_mesh": mesh_of(1, 2)} if strategy.startswith("hybrid") else {}
    model = FSDP(last(), strategy=strategy, transport=transport, auto_wrap_policy=None, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert_same(run(model, optimizer), losses, "the losses")
    assert_same(SEEN, strides, "strides in forward")
    # BatchNorm's buffers are each rank's own in both
    assert_same(model.state_dict(), plain.state_dict(), "the state")
    states = (each.state_dict()["state"] for each in (optimizer, theirs))
    assert_same(*states, "the optimizer's state")
    with FSDP.summon_full_params(model), torch.no_grad():
        summoned = {name: param.stride() for name, param in model.named_parameters()}
        assert_same(summoned, strides, "summoned strides")
        for each in (model, plain):
            each.conv.stages[0][0].weight[:, 1] *= 2
    assert_same(model.state_dict(), plain.state_dict(), "the state after a write")
    model.load_state_dict(last().state_dict())
    assert_same(model.state_dict(), last().state_dict(), "the loaded state")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("precision", [None, zshard.MixedPrecision(torch.bfloat16)], ids=str)
@on_ranks(2)
def test_predicted_slots(transport, precision):
    options = {"transport": transport, "mixed_precision": precision}
    check_plan(FSDP(last(), auto_wrap_policy={nn.Conv2d}, **options), CASE, steps=3)
