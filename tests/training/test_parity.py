"""The numbers of training are those of DDP, bit for bit, whatever is sharded and however it travels."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import (
    CASES,
    COMBINATIONS,
    ddp,
    differences,
    loss_of,
    make,
    make_optimizer,
    train,
)
from spawn import on_ranks, ranks

from zshard import FSDP

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


def train_by_ddp(name, optimizer):
    """(losses, state dict) under DDP."""
    case, rank = CASES[name], dist.get_rank()
    model = make(case.make, seed=1 + rank)  # DDP takes rank 0's weights, and so has FSDP to
    parallel = ddp(model, find_unused_parameters=case.unused)
    losses = train(parallel, case, make_optimizer(optimizer, model), rank)
    return losses, model.state_dict()


def train_sharded(name, optimizer, combination):
    """(losses, state dict) under zshard."""
    case, rank = CASES[name], dist.get_rank()
    strategy, transport = combination
    model = FSDP(
        make(case.make, seed=1 + rank),
        strategy=strategy,
        transport=transport,
        auto_wrap_policy=case.policy,
    )
    losses = train(model, case, make_optimizer(optimizer, model), rank)
    return losses, model.state_dict()


def differences_from_ddp(name, optimizer):
    """{combination: what differs from DDP}."""
    losses, state = train_by_ddp(name, optimizer)
    found = {}
    for combination in COMBINATIONS:
        ours = train_sharded(name, optimizer, combination)
        found[combination] = differences(ours[1], state)
        if ours[0] != losses:
            found[combination].append(f"losses: {ours[0]}, not {losses}")
    return found


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "optimizer"), PAIRS)
def test_two_ranks_are_bit_identical_to_ddp(pool2, name, optimizer):
    for rank, found in enumerate(pool2.run(differences_from_ddp, name, optimizer)):
        assert not any(found.values()), f"rank {rank}: {found}"


def relative(a, b):
    """The largest difference, in units of b's size or of 1 where b is smaller."""
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    return float(((a - b).abs() / b.abs().clamp(min=1)).max()) if b.numel() else 0.0


def distances_from_ddp(name, optimizer):
    """({combination: what differs from the first combination}, largest distance from DDP)."""
    losses, state = train_by_ddp(name, optimizer)
    first, *others = COMBINATIONS
    our_losses, ours = train_sharded(name, optimizer, first)
    assert ours.keys() == state.keys()
    distance = max(relative(ours[key], value) for key, value in state.items())
    distance = max(distance, relative(our_losses, losses))
    found = {}
    for combination in others:
        more_losses, more = train_sharded(name, optimizer, combination)
        found[combination] = differences(more, ours)
        if more_losses != our_losses:
            found[combination].append(f"losses: {more_losses}, not {our_losses}")
    return found, distance


@pytest.mark.sampled(2)
@ranks(3, 4)
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
def test_more_ranks_agree_and_are_close_to_ddp(pool, name, optimizer):
    # The mean of three numbers depends on who adds in which order: DDP's ring is another.
    for rank, (found, distance) in enumerate(pool.run(distances_from_ddp, name, optimizer)):
        assert not any(found.values()), f"rank {rank}: {found}"
        assert distance <= 1e-6, f"rank {rank}"


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "optimizer"), PAIRS)
def test_world_size_one_is_bit_identical_to_the_plain_module(name, optimizer):
    case = CASES[name]
    plain = make(case.make)
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=case.policy)
    ours = train(model, case, make_optimizer(optimizer, model), rank=0)
    assert ours == train(plain, case, make_optimizer(optimizer, plain), rank=0)
    assert differences(model.state_dict(), plain.state_dict()) == []


@on_ranks(2)
def test_process_group_of_one():
    """A rank that shards over a group of itself alone trains as a plain model."""
    rank = dist.get_rank()
    groups = [dist.new_group([member]) for member in range(dist.get_world_size())]
    case = CASES["net"]
    plain = make(case.make, seed=1 + rank)
    model = FSDP(copy.deepcopy(plain), groups[rank])
    ours = train(model, case, make_optimizer("zshard.AdamW", model), rank)
    theirs = train(plain, case, make_optimizer("zshard.AdamW", plain), rank)
    assert ours == theirs
    assert_same(model.state_dict(), plain.state_dict(), "the state")


@on_ranks(4)
def test_two_process_groups():
    """Two pairs of four ranks each train their own model, as DDP over the same pair."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pair, case = pairs[rank % 2], CASES["mlp"]
    plain = make(case.make, seed=1 + rank)
    model = FSDP(copy.deepcopy(plain), pair)
    parallel = ddp(plain, process_group=pair)
    ours = train(model, case, make_optimizer("torch.SGD", model), rank)
    theirs = train(parallel, case, make_optimizer("torch.SGD", plain), rank)
    assert ours == theirs
    assert_same(model.state_dict(), plain.state_dict(), "the state")


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@on_ranks(2)
def test_clipping_uses_the_global_norm(norm_type):
    """{combination: what differs from DDP} if the gradients are clipped, by both ways to do it."""
    name = "net"
    case, rank = CASES[name], dist.get_rank()
    clip = torch.nn.utils.clip_grad_norm_

    def trained(model, clipped):
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        norms = []
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model(case.batch(step, rank))).backward()
            norms.append(float(clipped(model)))
            optimizer.step()
        return norms

    plain = make(case.make)
    expected = trained(ddp(plain), lambda model: clip(model.parameters(), 0.05, norm_type))
    whole = plain.state_dict()
    found = {}
    for strategy, transport in COMBINATIONS:
        for way in ("method", "function"):
            model = FSDP(make(case.make), strategy=strategy, transport=transport)
            norms = trained(
                model,
                (lambda model: model.clip_grad_norm_(0.05, norm_type))
                if way == "method"
                else (lambda model: clip(model.parameters(), 0.05, norm_type)),
            )
            state = model.state_dict()
            close = all(torch.allclose(state[k], whole[k], rtol=1e-5, atol=1e-6) for k in whole)
            near = torch.allclose(torch.tensor(norms), torch.tensor(expected), rtol=1e-6)
            found[strategy, transport, way] = (close, near)
    clips = max(expected) > 0.05
    assert clips, "the limit is too high to test anything"
    assert set(found.values()) == {(True, True)}, found
