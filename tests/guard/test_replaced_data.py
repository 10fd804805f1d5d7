"""`p.data = t` between steps: memory that other tensors also use is never overwritten.

A script that swaps weights is correct if it trains bit-identically to DDP. Each swap is a function
of a Training, which both run.
"""

import pytest
import torch
from models import COMBINATIONS, differences
from offloaded import to
from rows import all_raise
from scenario import Scenario
from spawn import on_ranks
from torch import nn

from zshard import FSDP, ShardError
from zshard.wrap import ModuleWrapPolicy

MLP = Scenario("mlp", optimizer="torch.SGD")


def data_of(training):
    return [param.data for param in training.module.parameters()]


def put(training, values):
    for param, value in zip(training.module.parameters(), values, strict=True):
        param.data = value


def halve(training):
    put(training, [param.data * 0.5 for param in training.module.parameters()])


def evaluate(training):
    with torch.no_grad():
        training.module(training.scenario.case.batch(9, 0))


def average_and_back(training):
    """The idiom of many scripts, with copies."""
    backup = [value.clone() for value in data_of(training)]
    halve(training)
    evaluate(training)
    put(training, backup)


def back_before_any_forward(training):
    backup = data_of(training)
    halve(training)
    put(training, backup)


def state_dict_of_the_average(training):
    backup = [value.clone() for value in data_of(training)]
    halve(training)
    sums = [float(value.sum()) for value in training.module.state_dict().values()]
    put(training, [value + total * 1e-3 for value, total in zip(backup, sums, strict=True)])


SWAPS = [average_and_back, back_before_any_forward, halve, state_dict_of_the_average]


def swaps_once(swap):
    """After the second step: swap, and step where the parameters are then."""

    def after(training):
        if training.step == 2:
            swap(training)
            training.optimizer.step()

    return after


@pytest.mark.sampled(5)
@pytest.mark.parametrize("swap", SWAPS, ids=lambda swap: swap.__name__)
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_swaps_match_ddp(combination, swap):
    MLP.same(way=combination, after=swaps_once(swap))


@on_ranks(2)
def test_swaps_of_offloaded_parameters(tmp_path):
    MLP.same(after=swaps_once(average_and_back), options={"offload": to(str(tmp_path))})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_shared_memory_is_never_overwritten(combination):
    """The next pass is an error about a parameter whose memory another tensor uses; the script can
    continue."""
    training = MLP.but(way=combination).sharded(1)
    backup, before = data_of(training), training.state()
    halve(training)
    for _ in range(2):
        with pytest.raises(ShardError, match=r"parameter '[^']*'(.|\n)*backup = p.data.clone\(\)"):
            evaluate(training)
    put(training, backup)
    evaluate(training)
    assert differences(training.state(), before) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_memory_of_another_parameter_is_refused(combination):
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
    strategy, transport = combination
    policy = ModuleWrapPolicy({nn.Linear})
    model = FSDP(layers, strategy=strategy, transport=transport, auto_wrap_policy=policy)
    first, second = model.parameters()
    first.data = second.data
    tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    tied[1].weight.data = tied[0].weight.data
    all_raise(
        ValueError,
        {
            "'0.weight'": lambda: model(torch.ones(2, 64)),
            "q.data.clone()": lambda: model(torch.ones(2, 64)),
            "'0.weight' and '1.weight' share memory": lambda: FSDP(tied, transport=transport),
        },
    )


@on_ranks(2)
def test_disjoint_views_are_not_ties():
    """Wrap rows and columns of one tensor each."""
    rows, columns = torch.randn(4, 8), torch.randn(8, 4)
    parts = (rows[:2], rows[2:], columns[:, :2], columns[:, 2:])
    model = nn.ParameterList([nn.Parameter(part) for part in parts])
    FSDP(model, auto_wrap_policy=None)
