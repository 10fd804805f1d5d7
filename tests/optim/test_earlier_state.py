"""Optimizers that have state when their parameters are sharded: from a snapshot that a script loads
before it wraps the model, or from steps of the plain model.

The reference is a plain model, trained on all ranks' batches, that is never wrapped.
"""

import copy

import pytest
import torch.distributed as dist
from compare import differences
from groups import own_group
from models import COMBINATIONS, loss_of, make, make_optimizer
from scenarios import Wide, floats
from spawn import ranks

import zshard
from zshard import FSDP

OPTIMIZERS = ["torch.AdamW", "zshard.AdamW", "torch.SGD", "zshard.SGD", "torch.Adagrad"]


def plain_steps(model, optimizer, steps):
    world = dist.get_world_size()
    for i in steps:
        optimizer.zero_grad()
        sum(loss_of(model(floats(rank, i))) for rank in range(world)).div(world).backward()
        optimizer.step()


def own_steps(model, optimizer, steps):
    for i in steps:
        optimizer.zero_grad()
        loss_of(model(floats(dist.get_rank(), i))).backward()
        optimizer.step()


def state_survives(combination, name, loads):
    strategy, transport = combination
    plain = make(Wide)
    theirs = make_optimizer(name, plain)
    plain_steps(plain, theirs, range(3))
    if loads:  # as a resuming script
        model = make(Wide, seed=2)
        optimizer = make_optimizer(name, model)
        model.load_state_dict(copy.deepcopy(plain.state_dict()))
        optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    else:
        model = make(Wide)
        optimizer = make_optimizer(name, model)
        plain_steps(model, optimizer, range(3))
    FSDP(model, own_group(), strategy=strategy, transport=transport)
    found = differences(state_of(optimizer), state_of(theirs))  # before a step
    plain_steps(plain, theirs, range(3, 6))
    own_steps(model, optimizer, range(3, 6))
    found += differences(model.state_dict(), plain.state_dict())
    return found + differences(state_of(optimizer), state_of(theirs))


def state_of(optimizer):
    return {f"{i}": own for i, own in optimizer.state_dict()["state"].items()}


@ranks(2)
@pytest.mark.sampled(6)
@pytest.mark.parametrize("loads", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_state_from_before_sharding(pool, combination, name, loads):
    assert pool.run(state_survives, combination, name, loads) == [[]] * pool.world


def by_layers():
    """fully_shard() layer by layer; a float64 state of a float32 parameter keeps its dtype."""
    plain, model = make(Wide), make(Wide)
    theirs, optimizer = (make_optimizer("torch.AdamW", each) for each in (plain, model))
    plain_steps(plain, theirs, range(2))
    plain_steps(model, optimizer, range(2))
    for each in (theirs, optimizer):
        for own in each.state.values():
            own["of its own"] = own["exp_avg"].double()
    for layer in (model.first, model.second):
        zshard.fully_shard(layer)
    zshard.fully_shard(model)
    return differences(state_of(optimizer), state_of(theirs))


@ranks(2, 3)
def test_state_from_before_fully_shard(pool):
    assert pool.run(by_layers) == [[]] * pool.world
