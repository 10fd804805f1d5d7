"""Submodules of a sharded model that are removed, replaced by one that is then sharded, or added.

The plain model gets the same removals and replacements, and both ranks' batches; then everything
that a script may query is compared.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from compare import differences
from groups import own_group, passing_groups
from models import TRANSPORTS, make
from scenarios import WIDTH, Stack, floats, loss_of, message_of, over
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, fully_shard


def other():
    return make(lambda: nn.Linear(WIDTH, 2), 5)


def without_head(model):
    model.head = nn.Identity()


def without_last_block(model):
    del model.blocks[-1]


def without_bias(model):
    model.head.bias = None


def with_other_head(model):
    model.head = other()
    if isinstance(model, FSDP):
        with over(model._zshard_state.comms.all.transport):
            fully_shard(model.head)


CHANGES = (without_head, without_last_block, without_bias, with_other_head)


def sharded(how, transport):
    model = make(Stack)
    if how != "fully_shard":
        return FSDP(model, strategy=how, transport=transport, auto_wrap_policy={nn.Linear})
    with over(transport):
        for each in (*model.blocks, model.head):
            fully_shard(each)
        return fully_shard(model)


def step(model, optimizer, number, batches):
    optimizer.zero_grad()
    for rank in batches:
        (loss_of(model(floats(rank, number))) / len(batches)).backward()
    optimizer.step()


def held(model, optimizer):
    state = optimizer.state_dict()
    found = {f"{n}.{k}": v for n, own in state["state"].items() for k, v in own.items()}
    numbers = [group["params"] for group in state["param_groups"]]
    return {**model.state_dict(), **found, "numbers": numbers}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("how", ["full_shard", "zero1", "no_shard", "fully_shard"])
@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_training_and_saving_continue(change, how, transport, anew):
    """Return what differs from the plain model, after steps with the earlier optimizer or a new
    one."""
    rank, plain = dist.get_rank(), make(Stack)
    model = sharded(how, transport)
    found = []
    for each, batches in ((plain, (0, 1)), (model, (rank,))):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        step(each, optimizer, 0, batches)
        change(each)
        if anew:
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        step(each, optimizer, 1, batches)
        again = torch.optim.SGD(optimizer.param_groups[0]["params"], lr=0.1, momentum=0.9)
        again.load_state_dict(optimizer.state_dict())
        step(each, again, 2, batches)
        found.append(held(each, again))
    alone = transport == "shm" and rank == 0  # one rank may save alone
    found.append(held(model, again) if alone else found[1])
    dist.barrier()
    assert differences(found[1], found[0]) + differences(found[2], found[1]) == []


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
@passing_groups()
def test_unsharded_replacements_are_named(transport):
    group = own_group()  # differing ranks leave it broken
    model = FSDP(make(Stack), group, transport=transport)
    model.head = other()  # on each rank independently
    text = message_of(lambda: model(floats(0)), ValueError)
    assert "'head' was added to a Stack after FSDP" in text and "fully_shard(module)" in text
    assert message_of(lambda: model(floats(0)), ValueError) == text
    FSDP(model.head, group, transport=transport)
    loss_of(model(floats(0))).backward()
    if dist.get_rank() == 0:
        model.blocks[0].up.bias = None
    with pytest.raises(zshard.DivergenceError, match="do not train the same parameters"):
        for number in range(3):
            loss_of(model(floats(0, number))).backward()


# --- additions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_unsharded_additions_are_refused(transport):
    model = make(Stack)
    model.extra = nn.Linear(2, 2)
    model = FSDP(model, transport=transport, ignored_modules=[model.extra])
    for each in (model, copy.deepcopy(model)):
        new = nn.Parameter(torch.ones(3))
        for name, add in {
            "'gain'": lambda at=each, p=new: setattr(at, "gain", p),
            "'tail'": lambda at=each: setattr(at, "tail", nn.Linear(WIDTH, 3)),
            "'3'": lambda at=each: at.blocks.append(nn.Linear(1, 1)),
            "'other'": lambda at=each, p=new: at.head.register_parameter("other", p),
        }.items():
            text = message_of(add, ValueError)
            assert name in text and "before FSDP(...)" in text
        each.head.gain = None
        each.head.dropout = nn.Dropout()
        each.head.register_buffer("mean", torch.zeros(1))
        each.head.fixed = nn.Parameter(torch.ones(1), requires_grad=False)
        each.extra.gain = nn.Parameter(torch.ones(1))
        each.again = each.head  # already part of the model
        del each.again
        loss_of(each(torch.ones(2, WIDTH))).backward()
        grads = sum(p.grad is not None for p in each.parameters())
        assert grads == sum(1 for _ in make(Stack).parameters())


def test_single_rank_accepts_any_addition():
    model = FSDP(make(Stack))
    model.gain = nn.Parameter(torch.ones(1))
    model.head = nn.Linear(WIDTH, 3)
    (loss_of(model(torch.ones(2, WIDTH))) * model.gain).sum().backward()
    assert model.gain.grad is not None and model.head.weight.grad is not None
