"""copy.deepcopy of a sharded model returns another one, as scripts use it for a moving average of
weights."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import CASES, COMBINATIONS, Block, differences, loss_of, make, train, wrapped
from scenarios import WIDTH, Stack, floats
from spawn import on_ranks
from torch import nn
from torch.optim.swa_utils import AveragedModel

import zshard
from zshard import FSDP, MixedPrecision


def copies_are_equal_and_apart(name, combination):
    """Return (what differs right away, whether training one leaves the other unchanged and trains
    the same)."""
    case, rank = CASES[name], dist.get_rank()
    model = wrapped(case.make, combination, auto_wrap_policy=case.policy)
    before = copy.deepcopy(model.state_dict())
    twin = copy.deepcopy(model)
    assert type(twin) is type(model) and twin is not model
    same = differences(twin.state_dict(), before)
    losses = train(model, case, torch.optim.SGD(model.parameters(), 0.1), rank)
    apart = differences(twin.state_dict(), before)
    again = train(twin, case, torch.optim.SGD(twin.parameters(), 0.1), rank)
    alike = differences(twin.state_dict(), model.state_dict())
    assert losses == again
    return same, apart, alike


@pytest.mark.parametrize("name", ["mlp", "net", "odds", "tied"])
def test_copy_is_independent(pool2, name):
    for combination in COMBINATIONS:
        for same, apart, alike in pool2.run(copies_are_equal_and_apart, name, combination):
            assert (same, apart, alike) == ([], [], []), combination


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_moving_average(combination):
    """Return what differs between the average of a sharded model's weights and of a plain one's."""
    plain = make(Stack)
    model = wrapped(Stack, combination)
    means = []
    for net in (plain, model):
        mean = AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(net(floats(0, step))).backward()
            optimizer.step()
            mean.update_parameters(net)
        means.append(mean)
    theirs, ours = (mean.module.state_dict() for mean in means)
    with torch.no_grad():
        torch.testing.assert_close(means[1](floats(5)), means[0](floats(5)), rtol=1e-5, atol=1e-6)
    assert differences(ours, theirs) == []


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


def unit_of(module):
    return module._zshard_state.unit


@on_ranks(2)
def test_copied_attributes():
    model = Special()
    model = FSDP(model, auto_wrap_policy=None, ignored_modules=[model.alone])
    model(floats(0))
    twin = copy.deepcopy(model)
    twin(floats(0))
    assert_same(twin(floats(1)), model(floats(1)), "the copy's output")
    facts = (
        (len(model.calls), len(twin.calls)),
        [unit.name for unit in map(unit_of, FSDP.fsdp_modules(twin))],
        twin.frozen.weight.requires_grad,
        twin.frozen.weight.tag,
        zshard.shard_info(twin.alone.weight),
        twin.scale is not model.scale,
    )
    assert facts == ((2, 3), ["", "block"], False, "a user's", None, True)


@on_ranks(2)
def test_copied_settings():
    """A copy has what the script has set after FSDP()."""
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
    assert differences(twin.state_dict(), make(Stack).state_dict()) == []


@on_ranks(2)
def test_copy_computes_in_the_same_dtypes():
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    model = FSDP(make(Stack), mixed_precision=policy)
    twin = copy.deepcopy(model)
    assert_same(twin(floats(0)), model(floats(0)), "the copy's output")
    assert twin(floats(0)).dtype == torch.bfloat16


def copied_after_a_forward(combination):
    """Return what differs between the values of a model and of its copy, made while a forward in
    bfloat16 has left units unsharded; and the copy's dtypes."""
    options = {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}
    model = wrapped(Stack, combination, **options)
    model(floats(0))
    model(floats(0, 1))
    twin = copy.deepcopy(model)
    wrong = differences(twin.state_dict(), model.state_dict())
    return wrong, {param.dtype for param in twin.parameters()}


def test_copy_keeps_the_dtype_after_a_forward(pool2):
    for combination in COMBINATIONS:
        found = pool2.run(copied_after_a_forward, combination)
        assert found == [([], {torch.float32})] * 2, combination


def test_single_rank():
    model = FSDP(make(Stack))
    twin = copy.deepcopy(model)
    assert_same(twin(floats(0)), model(floats(0)), "the copy's output")
    assert differences(twin.state_dict(), model.state_dict()) == []
