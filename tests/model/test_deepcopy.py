"""copy.deepcopy of a sharded model returns another one, as scripts use it for a moving average of
weights."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import COMBINATIONS, Block, loss_of, make, wrapped
from scenario import Scenario, Training
from scenarios import WIDTH, Stack, floats, unit_of
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, MixedPrecision


@pytest.mark.sampled(4)
@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("name", ["mlp", "net", "odds", "tied"])
@on_ranks(1, 2)
def test_copy_is_independent(name, combination):
    training = Scenario(name, combination, "torch.SGD").sharded()
    model = training.model
    before = copy.deepcopy(model.state_dict())
    twin = copy.deepcopy(model)
    assert type(twin) is type(model) and twin is not model
    assert_same(twin.state_dict(), before, "the copy")
    training.go()
    assert_same(twin.state_dict(), before, "the copy after the model's training")
    again = Training(training.scenario, twin, twin, training.rank).go()
    assert_same(again.state(), training.state(), "the copy's training")


class Special(nn.Module):
    """Buffers, hooks, attributes, frozen and ignored submodules, units wrapped by hand."""

    def __init__(self):
        super().__init__()
        self.block = FSDP(Block(WIDTH), auto_wrap_policy=None)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.alone = nn.Linear(WIDTH, 2)
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))
        self.calls = []
        self.register_forward_hook(count)
        self.frozen.weight.tag = "a user's"

    def forward(self, x):
        return self.alone(self.frozen(self.block(x)) * self.scale)


def count(module, args, output):
    module.calls.append("called")


@on_ranks(2)
def test_copied_attributes():
    model = Special()
    model = FSDP(model, auto_wrap_policy=None, ignored_modules=[model.alone])
    model(floats(0))
    twin = copy.deepcopy(model)
    twin(floats(0))
    assert (len(model.calls), len(twin.calls)) == (1, 2)
    assert_same(twin(floats(1)), model(floats(1)), "the copy's output")
    assert [unit_of(module).name for module in FSDP.fsdp_modules(twin)] == ["", "block"]
    assert twin.frozen.weight.tag == "a user's" and not twin.frozen.weight.requires_grad
    assert zshard.shard_info(twin.alone.weight) is None and twin.scale is not model.scale


@on_ranks(2)
def test_copied_settings():
    """A copy has attributes that the script has set after FSDP()."""
    model = FSDP(make(Stack), auto_wrap_policy={Block})
    block = next(module for module in FSDP.fsdp_modules(model) if module is not model)
    block.set_gradient_divide_factor(8.0)
    block.set_reshard_after_forward(False)
    model.set_requires_gradient_sync(False, recurse=False)
    config = zshard.compat.FullStateDictConfig(rank0_only=True)
    FSDP.set_state_dict_type(model, "FULL_STATE_DICT", config)
    twin = copy.deepcopy(model)
    assert FSDP.get_state_dict_type(twin) == FSDP.get_state_dict_type(model)
    assert bool(twin.state_dict()) == (dist.get_rank() == 0)
    ours, theirs = [
        [(unit.divisor, unit.strategy, unit.sync) for unit in map(unit_of, FSDP.fsdp_modules(each))]
        for each in (model, twin)
    ]
    assert ours == theirs and {8.0, "shard_grad_op", False} <= set().union(*ours)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(2)
def test_copy_between_forward_and_backward(strategy):
    """A copy between forward and backward, and of a model within a plain one."""
    model = FSDP(make(Stack), strategy=strategy)
    holder = nn.ModuleDict({"student": model, "head": nn.Linear(2, 2)})
    loss = loss_of(model(floats(0)))
    twin = copy.deepcopy(holder)["student"]
    loss.backward()
    fresh = FSDP(make(Stack), strategy=strategy)
    loss_of(fresh(floats(0))).backward()
    ours, theirs = ([p.grad.clone() for p in each.parameters()] for each in (model, fresh))
    assert_same(ours, theirs, "the gradients")
    assert_same(twin.state_dict(), make(Stack).state_dict(), "the copy")


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_copy_keeps_the_dtype_after_a_forward(combination):
    """A forward in bfloat16 may have left units unsharded."""
    model = wrapped(Stack, combination, mixed_precision=MixedPrecision(torch.bfloat16))
    model(floats(0))
    model(floats(0, 1))
    twin = copy.deepcopy(model)
    assert_same(twin.state_dict(), model.state_dict(), "the copy")
    assert {param.dtype for param in twin.parameters()} == {torch.float32}
    assert_same(twin(floats(0)), model(floats(0)), "the copy's output")
    assert twin(floats(0)).dtype == torch.bfloat16


def test_single_rank():
    model = FSDP(make(Stack))
    model.trainer = {"model": weakref.proxy(model)}  # as a trainer refers to its model
    twin = copy.deepcopy(model)
    assert_same(twin(floats(0)), model(floats(0)), "the copy's output")
    assert_same(twin.state_dict(), model.state_dict(), "the copy")
