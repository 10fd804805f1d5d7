"""Averages of weights as other libraries keep them, of a sharded model: the plain model's numbers,
or an error that says what to write."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import CASES, COMBINATIONS, loss_of, make, wrapped
from rows import all_refused
from scenario import sharded
from scenarios import Stack, floats, learn, whole
from spawn import on_ranks
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from zshard import FSDP, ShardError

STEPS = 3


class ListOfClones:
    """Averages as a list, and parameters that are set aside, as diffusers does."""

    def __init__(self, params, decay):
        self.means, self.decay, self.aside = [p.clone().detach() for p in params], decay, []

    @torch.no_grad()
    def update(self, params):
        for mean, param in zip(self.means, params, strict=True):
            mean.sub_((1 - self.decay) * (mean - param))

    def swap(self, params):
        params = list(params)
        self.aside = [param.detach().cpu().clone() for param in params]
        for mean, param in zip(self.means, params, strict=True):
            param.data.copy_(mean.to(param.device).data)

    def restore(self, params):
        for value, param in zip(self.aside, params, strict=True):
            param.data.copy_(value.data)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_lists_of_clones(combination):
    model, plain = wrapped(Stack, combination), make(Stack)
    means = [ListOfClones(each.parameters(), 0.9) for each in (model, plain)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        learn(model, optimizer, step)
        plain.load_state_dict(model.state_dict())
        before = whole(model)
        for mean, each in zip(means, (model, plain), strict=True):
            mean.update(each.parameters())
            mean.swap(each.parameters())
        assert_same(model.state_dict(), plain.state_dict(), "the averages")
        with torch.no_grad():
            torch.testing.assert_close(model(floats(9)), plain(floats(9)), rtol=1e-5, atol=1e-6)
        for mean, each in zip(means, (model, plain), strict=True):
            mean.restore(each.parameters())
        assert_same(model.state_dict(), before, "the model")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_torchs_averages_of_buffers(combination, use_buffers):
    """torch's average, of buffers too; and its simple mean."""
    model, plain, case = sharded("conv", combination), make(CASES["conv"].make), CASES["conv"]
    pairs = [
        [AveragedModel(each, multi_avg_fn=fn, use_buffers=use_buffers) for each in (model, plain)]
        for fn in (get_ema_multi_avg_fn(0.9), None)
    ]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model(case.batch(step, dist.get_rank()))).backward()
        optimizer.step()
        plain.load_state_dict(model.state_dict())
        for ours, theirs in pairs:
            ours.update_parameters(model)
            theirs.update_parameters(plain)
    for ours, theirs in pairs:
        assert_same(ours.module.state_dict(), theirs.module.state_dict(), "the average")
        assert int(ours.n_averaged) == int(theirs.n_averaged) == STEPS


@on_ranks(2)
def test_averages_from_before_sharding():
    """A copy from before FSDP(...) has full tensors; the error says when to make it."""
    plain = make(Stack)
    early = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    clones, twin = ListOfClones(plain.parameters(), 0.9), copy.deepcopy(plain)
    model = FSDP(plain)
    pairs = zip(twin.parameters(), model.parameters(), strict=True)
    calls = {
        "torch": lambda: early.update_parameters(model),
        "clones": lambda: clones.update(model.parameters()),
        "deepcopy": lambda: [mean.lerp_(param, 0.1) for mean, param in pairs],
    }
    says = "after FSDP(...), so that they are"
    with torch.no_grad():
        all_refused({name: (call, ShardError, says) for name, call in calls.items()})
