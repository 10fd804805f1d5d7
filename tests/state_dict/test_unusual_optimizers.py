"""Optimizers of scripts, whose state or steps are unlike torch's: they step and load as they do over
a plain model.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from compare import differences
from models import make, wrapped
from scenarios import Stack, floats
from torch.optim import Optimizer

import zshard

SHM, C10D, REPLICATED = ("full_shard", "shm"), ("full_shard", "c10d"), ("no_shard", "shm")


class WithoutOptions(Optimizer):
    def __init__(self, params):
        super().__init__(params, {})


class Twins(WithoutOptions):
    """Its first step keeps one tensor under two names."""

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            state, grad = self.state[param], param.grad
            if not state:
                state["fast"] = state["slow"] = grad.clone()
            else:
                state["fast"], state["slow"] = state["fast"] / 2 + grad, state["slow"] / 4 + grad
            param.sub_(state["fast"] * 0.01 + state["slow"] * 0.02)


class Remembers(WithoutOptions):
    """It keeps numbers of other shapes than the parameter's."""

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["history"] = state.get("history", torch.zeros(10)) + 1
            param.sub_(param.grad * state["history"][0] * 0.01)


class TwoLooks(WithoutOptions):
    """It calls its closure twice."""

    @torch.no_grad()
    def step(self, closure):
        for _ in range(2):
            with torch.enable_grad():
                loss = closure()
            for param in self.param_groups[0]["params"]:
                param.sub_(param.grad * 0.01)
        return loss


def train(model, optimizer, n):
    for i in range(n):
        optimizer.zero_grad()
        model(floats(i)).sum().backward()
        optimizer.step()


def resumed(kind, combination, folder, how):
    """Return the model after steps, a load of earlier state, and another step."""
    model = make(Stack) if combination is None else wrapped(Stack, combination)
    optimizer = kind(model.parameters())
    train(model, optimizer, 2)
    earlier = {**model.state_dict()}, optimizer.state_dict()
    if how == "file" and combination is not None:
        zshard.save(f"{folder}/saved", model, optimizer)
        train(model, optimizer, 1)
        zshard.load(f"{folder}/saved", model, optimizer)
    else:
        earlier = {n: t.clone() for n, t in earlier[0].items()}, earlier[1]
        optimizer.load_state_dict(earlier[1])
        model.load_state_dict(earlier[0])
    train(model, optimizer, 2)
    return {n: t.clone() for n, t in model.state_dict().items()}


def resumes_like_a_plain_model(kind, combination, folder, how):
    found = resumed(kind, combination, folder, how)
    dist.barrier()
    return differences(found, resumed(kind, None, folder, how))


@pytest.mark.parametrize("how", ["file", "state dict"])
@pytest.mark.parametrize(
    ("kind", "combination"),
    [(Twins, SHM), (Twins, C10D), (Twins, REPLICATED), (Remembers, REPLICATED)],
)
def test_their_state_loads(pool2, tmp_path, kind, combination, how):
    assert pool2.run(resumes_like_a_plain_model, kind, combination, str(tmp_path), how) == [[], []]


def looks(combination):
    """Return the model after steps whose closure evaluates before it trains."""
    model = make(Stack) if combination is None else wrapped(Stack, combination)
    optimizer = TwoLooks(model.parameters())

    def closure():
        with torch.no_grad():
            model(floats(0))
        optimizer.zero_grad()
        loss = model(floats(1)).sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return {n: t.clone() for n, t in model.state_dict().items()}


def looks_like_a_plain_model(combination):
    return differences(looks(combination), looks(None))


@pytest.mark.parametrize("combination", [SHM, C10D, REPLICATED])
def test_a_closure_may_evaluate_and_be_called_twice(pool2, combination):
    assert pool2.run(looks_like_a_plain_model, combination) == [[], []]


class OfABase(torch.optim.SGD):
    """Its step() is its base class's, which torch hooks too once that has an instance of its own."""

    fails = False

    def step(self, closure=None):
        result = super().step(closure)
        if self.fails:
            raise OverflowError
        return result


def steps_of_a_base(combination):
    """Return the model after steps, a tenth of them failing; state is read right after each."""
    torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
    model = make(Stack) if combination is None else wrapped(Stack, combination)
    optimizer = OfABase(model.parameters(), lr=1e-3, momentum=0.9)
    for i in range(30):
        optimizer.zero_grad()
        model(floats(i)).sum().backward()
        optimizer.fails = i % 10 == 5
        with contextlib.suppress(OverflowError):
            optimizer.step()
        model.state_dict(), optimizer.state_dict()
    return {n: t.clone() for n, t in model.state_dict().items()}


def steps_of_a_base_like_a_plain_model(combination):
    return differences(steps_of_a_base(combination), steps_of_a_base(None))


@pytest.mark.parametrize("combination", [SHM, C10D, REPLICATED])
def test_a_step_that_calls_its_base_class_is_one_step(pool2, combination):
    assert pool2.run(steps_of_a_base_like_a_plain_model, combination) == [[], []]


def ignoring(has_base):
    """Return a new class whose step() ignores its closure and calls that of its base class, which
    torch hooks too once that has an instance."""

    class Base(WithoutOptions):
        @torch.no_grad()
        def step(self, closure=None):
            for param in self.param_groups[0]["params"]:
                param.sub_(param.grad)

    class Ignoring(Base):
        def step(self, closure=None):
            return super().step()

    if has_base:
        Base([torch.nn.Parameter(torch.ones(2))])
    return Ignoring


def steps_without_its_closure(combination, has_base):
    model = make(Stack) if combination is None else wrapped(Stack, combination)
    optimizer = ignoring(has_base)(model.parameters())
    (model(floats(1)).sum() * 100).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step(lambda: None)
    return {n: t.clone() for n, t in model.state_dict().items()}


def same_without_its_closure(combination):
    with pytest.raises(RuntimeError, match="has not called its closure"):
        steps_without_its_closure(combination, False)
    found = steps_without_its_closure(combination, True)
    return differences(found, steps_without_its_closure(None, True))


@pytest.mark.parametrize("combination", [SHM, C10D, REPLICATED])
def test_a_closure_that_is_not_called_is_an_error_or_does_no_harm(pool2, combination):
    assert pool2.run(same_without_its_closure, combination) == [[], []]
