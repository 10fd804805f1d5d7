"""FSDP(check_replicas=N): a bit that flips in one replica is found N steps later, and named."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from groups import own_group, passing_groups
from models import loss_of, make
from scenarios import Stack, floats, message_of
from spawn import ranks
from torch import nn

import zshard
from zshard import FSDP
from zshard.ranks.agreement import bytes_of

EVERY = 3


class Buffered(nn.Module):
    """A stack with the same table on all ranks, and statistics that each has for itself."""

    def __init__(self):
        super().__init__()
        self.stack = Stack()
        self.register_buffer("table", torch.arange(9.0))
        self.norm = nn.BatchNorm1d(9)

    def forward(self, x):
        return self.stack(self.norm(x) + self.table)


def flip(tensor):
    """Flip the lowest bit of the first element, as a fault of the memory does: nothing notes it."""
    bytes_of(zshard.to_local(tensor.detach()))[0] ^= 1


@passing_groups()
def train(strategy, transport, what, victim, steps=2 * EVERY + 1):
    """Return the step at which an error came, and its text."""
    group = own_group()
    if strategy == "hybrid_shard":
        group = torch.distributed.init_device_mesh("cpu", (2, 2))
        given = {"device_mesh": group}
    else:
        given = {"process_group": group}
    model = FSDP(
        make(Buffered),
        strategy=strategy,
        transport=transport,
        timeout=30,
        check_replicas=EVERY,
        **given,
    )
    optimizer = zshard.SGD(model.parameters(), lr=1e-3)
    targets = {"parameter": model.stack.head.weight, "buffer": model.table}
    for step in range(steps):
        if step == EVERY and dist.get_rank() == victim:
            flip(targets[what])
        optimizer.zero_grad()
        loss_of(model(floats(dist.get_rank(), step))).backward()
        try:
            optimizer.step()
        except zshard.DivergenceError as error:
            return step, str(error)
    return None


@pytest.mark.sampled(3)
@ranks(2, 3)
@pytest.mark.parametrize("what", ["parameter", "buffer"])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_a_flipped_bit_is_found(pool, transport, what):
    name = {"parameter": "stack.head.weight", "buffer": "table"}[what]
    for found in pool.run(train, "no_shard", transport, what, 1):
        step, text = found
        assert step == 2 * EVERY - 1
        majority = f"{what} '{name}' on rank 1 is not that of rank 0, 2"
        even = f"{what} '{name}' is not the same on ranks 0, 1"
        assert f"replicas differ: {majority if pool.world == 3 else even}" in text
        assert "resume all ranks from a checkpoint" in text


@pytest.mark.sampled(1)
@ranks(4)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_replicas_of_shards_are_compared(pool, transport):
    found = pool.run(train, "hybrid_shard", transport, "parameter", 2)
    assert all(step == 2 * EVERY - 1 for step, _ in found)
    assert all("this shard of parameter 'stack.head.weight' is not the same" in t for _, t in found)
    assert all("on ranks 0, 2" in text for _, text in found)


def warned(strategy):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FSDP(make(Buffered), strategy=strategy, check_replicas=EVERY)
    return [each for each in map(str, (w.message for w in caught)) if "check_replicas" in each]


@ranks(2)
def test_rank_0_says_where_there_are_no_replicas(pool):
    assert pool.run(warned, "no_shard") == [[], []]
    (found, *more), others = pool.run(warned, "full_shard")
    assert "compares only buffers" in found and "or use hybrid_shard" in found
    assert more == others == []


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
def test_nothing_is_found_where_nothing_differs(pool, strategy):
    assert pool.run(train, strategy, "shm", "parameter", -1) == [None] * 2


@passing_groups()
def with_own_experts(transport):
    """A unit that each rank has for itself, with a buffer, is no replica."""
    group, model = own_group(), make(Buffered)
    alone = [dist.new_group([rank]) for rank in dist.get_process_group_ranks(group)]
    own = alone[dist.get_group_rank(group, dist.get_rank())]
    model.norm = FSDP(nn.Sequential(model.norm, nn.Linear(9, 9)), own, transport=transport)
    model = FSDP(model, group, strategy="no_shard", transport=transport, check_replicas=1)
    optimizer = zshard.SGD(model.parameters(), lr=1e-3)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model(floats(dist.get_rank(), step))).backward()
        optimizer.step()
    if dist.get_rank() == 1:
        flip(model.stack.head.weight)
    loss_of(model(floats(dist.get_rank(), 2))).backward()
    return message_of(optimizer.step, zshard.DivergenceError)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_a_unit_that_each_rank_has_for_itself_is_not_compared(pool2, transport):
    for said in pool2.run(with_own_experts, transport):
        assert "'stack.head.weight'" in said
