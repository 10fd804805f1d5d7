"""The numbers of training are those of DDP, bit for bit, whatever is sharded and however it travels."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import CASES, COMBINATIONS, ddp, make, make_optimizer, train
from scenario import Scenario
from spawn import on_ranks

# With zshard's optimizers the plain side has them too; test_optim.py holds them against torch's.
OPTIMIZERS = ("torch.SGD", "zshard.SGD", "torch.AdamW", "zshard.AdamW")
# A few models are trained by all, each other one by one of each rule. zshard.AdamW leaves parameters
# that are not contiguous to torch's rule, which rounds otherwise; no shard is such a one.
PAIRS = [
    (name, optimizer)
    for name in CASES
    for optimizer in OPTIMIZERS
    if name in ("mlp", "net", "odds") or optimizer in ("torch.SGD", "zshard.AdamW")
    if (name, optimizer) != ("odds", "zshard.AdamW")
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "optimizer"), PAIRS)
@on_ranks(2)
def test_two_ranks_are_bit_identical_to_ddp(name, optimizer):
    """Each rank starts from other values: DDP takes rank 0's, and so has FSDP to."""
    scenario = Scenario(name, optimizer=optimizer, steps=4)
    scenario.same_under(COMBINATIONS, seed=1 + dist.get_rank())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("mlp", "torch.SGD"),
        ("net", "zshard.SGD"),
        ("tied", "torch.SGD"),
        ("odds", "zshard.SGD"),
        ("conv", "torch.SGD"),
        ("mlp", "zshard.AdamW"),
        ("frozen", "torch.AdamW"),
    ],
)
@on_ranks(3, 4)
def test_more_ranks_agree_and_are_close_to_ddp(name, optimizer):
    """The mean of three numbers depends on who adds in which order: DDP's ring is another."""
    scenario = Scenario(name, optimizer=optimizer, steps=4)
    states = [scenario.but(way=way).sharded(None).state() for way in COMBINATIONS]
    for way, state in zip(COMBINATIONS, states, strict=True):
        assert_same(state, states[0], f"{name} under {way}")
    torch.testing.assert_close(states[0], scenario.ddp(None).state(), rtol=1e-6, atol=1e-6)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "optimizer"), PAIRS)
def test_world_size_one_is_bit_identical_to_the_plain_module(name, optimizer):
    alone = Scenario(name, ("full_shard", None), optimizer, steps=4)
    assert_same(alone.sharded(None).state(), alone.plain(None).state(), name)


@on_ranks(2)
def test_process_group_of_one():
    """A rank that shards over a group of itself alone trains as a plain model."""
    rank = dist.get_rank()
    groups = [dist.new_group([member]) for member in range(dist.get_world_size())]
    alone = Scenario("net", ("full_shard", None), options={"process_group": groups[rank]})
    ours, theirs = alone.sharded(4, 1 + rank), alone.plain(4, 1 + rank, rank)
    assert_same(ours.state(), theirs.state(), "a group of one")


@on_ranks(4)
def test_two_process_groups():
    """Two pairs of four ranks each train their own model, as DDP over the same pair."""
    rank, case = dist.get_rank(), CASES["mlp"]
    pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    options = {"process_group": pair}
    ours = Scenario("mlp", ("full_shard", None), "torch.SGD", options=options).sharded(4, 1 + rank)
    plain = make(case.make, seed=1 + rank)
    theirs = train(ddp(plain, **options), case, make_optimizer("torch.SGD", plain), rank)
    state = {"losses": theirs, "model": plain.state_dict()}
    assert_same(ours.state(), state, "a pair of four ranks")
