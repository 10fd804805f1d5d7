"""`p.data = t` between steps: memory that other tensors also use is never overwritten.

A script that swaps weights is correct if it trains bit-identically to DDP. Each swap is a function
of a model, which both run.
"""

import pytest
import torch
import torch.distributed as dist
from models import COMBINATIONS, ddp, differences, loss_of, make, wrapped
from offloaded import to
from scenarios import Stack, floats, message_of
from spawn import on_ranks
from torch import nn

from zshard import FSDP, ShardError
from zshard.wrap import ModuleWrapPolicy


def halved(model):
    for param in model.parameters():
        param.data = param.data * 0.5


def evaluate(model):
    with torch.no_grad():
        model(floats(0))


def average_and_back(model):
    """The idiom of many scripts, with copies."""
    backup = {name: param.data.clone() for name, param in model.named_parameters()}
    halved(model)
    evaluate(model)
    for name, param in model.named_parameters():
        param.data = backup[name]


def twice(model):
    params = list(model.parameters())
    first = [param.data.clone() for param in params]
    halved(model)
    evaluate(model)
    second = [param.data.clone() for param in params]
    halved(model)
    evaluate(model)
    for param, a, b in zip(params, first, second, strict=True):
        param.data = a + b


def back_before_any_forward(model):
    backup = [param.data for param in model.parameters()]
    halved(model)
    for param, value in zip(model.parameters(), backup, strict=True):
        param.data = value


def stepped_where_it_is(model):
    halved(model)


def state_dict_of_the_average(model):
    backup = [param.data.clone() for param in model.parameters()]
    halved(model)
    sums = [float(value.sum()) for value in model.state_dict().values()]
    for param, value, total in zip(model.parameters(), backup, sums, strict=True):
        param.data = value
        param.data.add_(total * 1e-3)


SWAPS = (
    *(average_and_back, twice, back_before_any_forward, stepped_where_it_is),
    state_dict_of_the_average,
)


def trained(model, inner, swap):
    """inner: the wrapped module, under DDP; it has the blocks."""
    optimizer = torch.optim.SGD(inner.parameters(), 0.1, momentum=0.9)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model(floats(10 * step + dist.get_rank())))
        loss.backward()
        losses.append(float(loss))
        if step == 1:
            swap(inner)
        optimizer.step()
    return losses


def compared(combination, swap, offload=None):
    """Return (same losses, what differs at the end)."""
    plain = make(Stack)
    model = wrapped(Stack, combination, offload=offload)
    theirs = trained(ddp(plain), plain, swap)
    return trained(model, model, swap) == theirs, differences(
        model.state_dict(), plain.state_dict()
    )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("swap", SWAPS, ids=lambda swap: swap.__name__)
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_swaps_match_ddp(pool2, combination, swap):
    assert pool2.run(compared, combination, swap) == [(True, [])] * 2


def test_swaps_of_offloaded_parameters(pool2, tmp_path):
    offload = to(str(tmp_path))
    results = pool2.run(compared, ("full_shard", "shm"), average_and_back, offload)
    assert results == [(True, [])] * 2


@pytest.mark.sampled(4)
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_shared_memory_is_never_overwritten(combination):
    """Return the next pass's error about a parameter whose memory another tensor uses, and whether
    the script can continue."""
    model = wrapped(Stack, combination)
    backup = [param.data for param in model.parameters()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    halved(model)
    said = [message_of(lambda: evaluate(model), ShardError) for _ in range(2)]
    for param, value in zip(model.parameters(), backup, strict=True):
        param.data = value
    evaluate(model)
    said = set(said)
    wrong = differences(model.state_dict(), before)
    (text,) = said
    assert "parameter '" in text and "backup = p.data.clone()" in text
    assert wrong == []


class Two(nn.Module):
    """Units of one parameter each; all ranks have elements of each."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_memory_of_another_parameter_is_refused(combination):
    model = wrapped(Two, combination, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    first, second = model.parameters()
    first.data = second.data
    said = message_of(lambda: model(torch.ones(2, 64)), ValueError)
    assert "'layers.0.weight'" in said and "q.data.clone()" in said


@on_ranks(2)
def test_parameters_that_share_memory_before_wrapping_are_refused():
    transport = "c10d"
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.data = model[0].weight.data
    said = message_of(lambda: FSDP(model, transport=transport), ValueError)
    assert "'0.weight' and '1.weight' share memory" in said and "tie them" in said


@on_ranks(2)
def test_disjoint_views_are_not_ties():
    """Wrap rows and columns of one tensor each."""
    rows, columns = torch.randn(4, 8), torch.randn(8, 4)
    parts = (rows[:2], rows[2:], columns[:, :2], columns[:, 2:])
    model = nn.ParameterList([nn.Parameter(part) for part in parts])
    FSDP(model, auto_wrap_policy=None)
