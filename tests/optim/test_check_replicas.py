"""FSDP(check_replicas=N): a bit that flips in one replica is found N steps later, and named."""

import warnings

import pytest
import torch
import torch.distributed as dist
from groups import own_group, passing_groups
from models import loss_of, make
from scenarios import Stack, floats, message_of
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP
from zshard.ranks.agreement import bytes_of

EVERY = 3
EACH_WAY = pytest.mark.parametrize("transport", ["shm", "c10d"])


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


def trained(model, what=None, victim=1, steps=2 * EVERY):
    """Train until an error comes; flip a bit on the way. Return the error's text, if it came at the
    expected step."""
    optimizer = zshard.SGD(model.parameters(), lr=1e-3)
    targets = {"parameter": model.stack.head.weight, "buffer": model.table, None: None}
    for step in range(steps):
        if step == EVERY and what is not None and dist.get_rank() == victim:
            flip(targets[what])
        optimizer.zero_grad()
        loss_of(model(floats(dist.get_rank(), step))).backward()
        if what is not None and step == steps - 1:
            return message_of(optimizer.step, zshard.DivergenceError)
        optimizer.step()
    return None


def checked(**options):
    return FSDP(make(Buffered), timeout=30, **{"check_replicas": EVERY, **options})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", ["parameter", "buffer"])
@EACH_WAY
@on_ranks(2, 3)
@passing_groups()
def test_a_flipped_bit_is_found(transport, what):
    model = checked(process_group=own_group(), strategy="no_shard", transport=transport)
    text = trained(model, what)
    name = {"parameter": "stack.head.weight", "buffer": "table"}[what]
    majority = f"{what} '{name}' on rank 1 is not that of rank 0, 2"
    even = f"{what} '{name}' is not the same on ranks 0, 1"
    assert f"replicas differ: {majority if dist.get_world_size() == 3 else even}" in text
    assert "resume all ranks from a checkpoint" in text


@pytest.mark.sampled(1)
@EACH_WAY
@on_ranks(4)
@passing_groups()
def test_replicas_of_shards_are_compared(transport):
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2))
    text = trained(
        checked(device_mesh=mesh, strategy="hybrid_shard", transport=transport), "parameter", 2
    )
    assert "this shard of parameter 'stack.head.weight' is not the same on ranks 0, 2" in text


@on_ranks(2)
def test_rank_0_says_where_there_are_no_replicas():
    for strategy, count in (("no_shard", 0), ("full_shard", 1 if dist.get_rank() == 0 else 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checked(strategy=strategy)
        texts = [each for each in map(str, (w.message for w in caught)) if "check_replicas" in each]
        assert len(texts) == count
        for text in texts:
            assert "compares only buffers" in text and "or use hybrid_shard" in text


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
@on_ranks(2)
def test_nothing_is_found_where_nothing_differs(strategy):
    trained(checked(strategy=strategy))


@EACH_WAY
@on_ranks(2)
@passing_groups()
def test_a_unit_that_each_rank_has_for_itself_is_not_compared(transport):
    """A unit of experts, with a buffer, is no replica."""
    group, model = own_group(), make(Buffered)
    alone = [dist.new_group([rank]) for rank in dist.get_process_group_ranks(group)]
    own = alone[dist.get_group_rank(group, dist.get_rank())]
    model.norm = FSDP(nn.Sequential(model.norm, nn.Linear(9, 9)), own, transport=transport)
    model = FSDP(model, group, strategy="no_shard", transport=transport, check_replicas=EVERY)
    assert "'stack.head.weight'" in trained(model, "parameter")
