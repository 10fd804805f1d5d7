"""Optimizers of scripts, whose state or steps are unlike torch's: they step and load as they do over
a plain model.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import make, wrapped
from scenarios import Stack, floats, whole
from spawn import on_ranks
from torch.optim import Optimizer

import zshard
from zshard.units.units import units_of

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


def stack(combination):
    """Return a sharded model, or without a combination a plain one."""
    return make(Stack) if combination is None else wrapped(Stack, combination)


def adam(params):
    return torch.optim.Adam(params, 0.01)


def stepped(combination, kind=adam):
    """Return a model and its optimizer after a step."""
    model = stack(combination)
    optimizer = kind(model.parameters())
    train(model, optimizer, 1)
    return model, optimizer


def train(model, optimizer, n, first=0):
    for i in range(first, first + n):
        optimizer.zero_grad()
        model(floats(i)).sum().backward()
        optimizer.step()


def same_as_plain(run, combination, *args):
    """Fail unless `run(combination, ...)` leaves the weights that it leaves in a plain model."""
    ours = whole(run(combination, *args))
    dist.barrier()
    assert_same(ours, whole(run(None, *args)), "the model")


def resumed(combination, kind, folder, how):
    """Return the model after a step, a load of earlier state, and two more steps."""
    model, optimizer = stepped(combination, kind)
    if how == "file" and combination is not None:
        zshard.save(folder, model, optimizer)
        train(model, optimizer, 1)
        zshard.load(folder, model, optimizer)
    else:
        earlier = whole(model), optimizer.state_dict()
        optimizer.load_state_dict(earlier[1])
        model.load_state_dict(earlier[0])
    train(model, optimizer, 2)
    return model


@pytest.mark.parametrize("how", ["file", "state dict"])
@pytest.mark.parametrize(
    ("kind", "combination"),
    [(Twins, SHM), (Twins, C10D), (Twins, REPLICATED), (Remembers, REPLICATED)],
)
@on_ranks(2)
def test_their_state_loads(kind, combination, how, tmp_path):
    same_as_plain(resumed, combination, kind, tmp_path / "saved", how)


def looks(combination):
    """Train with a closure that evaluates before it trains."""
    model = stack(combination)
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
    return model


@pytest.mark.parametrize("combination", [SHM, C10D, REPLICATED])
@on_ranks(2)
def test_a_closure_may_evaluate_and_be_called_twice(combination):
    same_as_plain(looks, combination)


class OfABase(torch.optim.SGD):
    """Its step() is its base class's, which torch also hooks once that has its own instance."""

    fails = False

    def step(self, closure=None):
        result = super().step(closure)
        if self.fails:
            raise OverflowError
        return result


class Wraps(WithoutOptions):
    """Its step() is another optimizer's, and a decay."""

    def __init__(self, params, **options):
        params = list(params)
        super().__init__(params)
        self.inner, self.fails = torch.optim.SGD(params, **options), False

    def step(self, closure=None):
        result = self.inner.step(closure)
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.mul_(0.99)
        if self.fails:
            raise OverflowError
        return result


def steps_of_two(combination, kind):
    """A tenth of the steps fails; state is read right after each."""
    torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
    model = stack(combination)
    optimizer = kind(model.parameters(), lr=1e-3, momentum=0.9)
    for i in range(30):
        optimizer.fails = i % 10 == 5
        with contextlib.suppress(OverflowError):
            train(model, optimizer, 1, first=i)
        model.state_dict(), optimizer.state_dict()
    return model


@pytest.mark.parametrize("kind", [OfABase, Wraps])
@pytest.mark.parametrize("combination", [SHM, C10D, REPLICATED])
@on_ranks(2)
def test_a_step_that_calls_another_is_one_step(kind, combination):
    same_as_plain(steps_of_two, combination, kind)


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
    model = stack(combination)
    optimizer = ignoring(has_base)(model.parameters())
    (model(floats(1)).sum() * 100).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step(lambda: None)
    return model


@pytest.mark.parametrize("combination", [SHM, C10D, REPLICATED])
@on_ranks(2)
def test_a_closure_that_is_not_called_is_an_error_or_does_no_harm(combination):
    with pytest.raises(RuntimeError, match="has not called its closure"):
        steps_without_its_closure(combination, False)
    same_as_plain(steps_without_its_closure, combination, True)


class StepsWithItsOwn(WithoutOptions):
    """It gives another optimizer, or its base class, its own closure."""

    def __init__(self, params):
        params = list(params)
        super().__init__(params)
        self.inner, self.own = torch.optim.SGD(params, lr=1.0), None

    def step(self, closure=None):
        return self.inner.step(self.own)


def steps_with_its_own(combination):
    model = stack(combination)
    optimizer = StepsWithItsOwn(model.parameters())

    def own():
        optimizer.zero_grad()
        loss = model(floats(1)).sum() * 100
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return loss

    optimizer.own = own
    for _ in range(2):
        optimizer.step()
    return model


@pytest.mark.parametrize("combination", [SHM, C10D, REPLICATED])
@on_ranks(2)
def test_a_closure_of_its_own_is_checked_or_refused(combination):
    if combination[1] == "shm":
        with pytest.raises(RuntimeError, match=r"within optimizer.step\(\) or one of its hooks"):
            steps_with_its_own(combination)
    else:
        same_as_plain(steps_with_its_own, combination)


# --- hooks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("combination", [SHM, C10D])
@on_ranks(2)
def test_state_dict_hooks_may_change_the_format(combination):
    for change in (dict.popitem, dict.clear, lambda packed: packed.update(state=None)):
        _, optimizer = stepped(combination)
        optimizer.register_state_dict_post_hook(
            lambda _, packed, change=change: change(packed) and 0
        )
        optimizer.state_dict()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("combination", [SHM, C10D])
@on_ranks(2)
def test_a_load_hook_may_load_another_optimizer(combination, fails, tmp_path):
    (model, mine), (_other, theirs) = (stepped(combination) for _ in range(2))
    train(model, mine, 1)
    zshard.save(tmp_path / "saved", model, mine)
    saved, before = mine.state_dict(), theirs.state_dict()
    train(model, mine, 1)
    now = mine.state_dict()

    def hook(_, packed):
        theirs.load_state_dict(saved)
        if fails and dist.get_rank() == 1:
            raise ValueError("a hook")

    mine.register_load_state_dict_pre_hook(hook)
    with pytest.raises(ValueError, match="a hook") if fails else contextlib.nullcontext():
        zshard.load(tmp_path / "saved", model, mine)
    dist.barrier()
    assert_same(mine.state_dict(), now if fails else saved, "the optimizer")
    assert_same(theirs.state_dict(), before if fails else saved, "the other one")


# --- state that a script replaces -----------------------------------------------------------------


@pytest.mark.parametrize("meets", [True, False])
@on_ranks(2)
def test_a_lone_read_of_replaced_state_is_right_or_an_error(meets):
    """Rank 0 reads alone the state that all ranks have replaced."""
    model, optimizer = stepped(SHM)
    dist.barrier()
    for state in optimizer.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])
    if meets:
        dist.barrier()
    if dist.get_rank() == 0 and meets:
        assert not any(s["exp_avg"].any() for s in optimizer.state_dict()["state"].values())
    elif dist.get_rank() == 0:
        with pytest.raises(zshard.DivergenceError, match=r"barrier\(\) on all ranks first"):
            optimizer.state_dict()
    train(model, optimizer, 1)
    assert optimizer.state_dict()["state"][0]["step"].item() == 2


@on_ranks(2)
def test_a_lone_read_after_a_group_was_added():
    model, optimizer = stepped(SHM, lambda params: adam(list(params)[:-2]))
    params = list(model.parameters())
    optimizer.add_param_group({"params": params[-2:]})
    dist.barrier()
    if dist.get_rank() == 0:
        assert len(optimizer.state_dict()["param_groups"]) == 2
    train(model, optimizer, 1)
    assert len(optimizer.state_dict()["state"]) == len(params)


def compiled_steps(combination):
    """Train; compiled if the model is sharded."""
    model = stack(combination)
    optimizer = adam(model.parameters())
    if combination is not None:
        optimizer.step = torch.compile(optimizer.step, backend="eager")
    train(model, optimizer, 3)
    return model


@pytest.mark.parametrize("combination", [SHM, C10D])
@on_ranks(2)
def test_a_compiled_step(combination):
    same_as_plain(compiled_steps, combination)


class Partly(WithoutOptions):
    """Its step() changes its parameters, and then calls another optimizer's step()."""

    def __init__(self, params, inner=None):
        super().__init__(params)
        self.inner = inner

    def step(self, closure=None):
        if self.inner is not None:
            self.inner.step()
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.sub_(param.grad * 0.01)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_steps_within_steps_of_other_models(transport):
    """The outer optimizer has one model, the inner ones two."""
    first, second = (wrapped(Stack, ("full_shard", transport)) for _ in range(2))
    both = [*first.parameters(), *second.parameters()]
    outer = Partly(first.parameters(), Partly(both, Partly(both)))
    for step in range(2):
        for model in (first, second):
            model(floats(dist.get_rank(), step)).square().mean().backward()
        outer.step()
        outer.zero_grad()
        second.zero_grad()
    assert all(value.isfinite().all() for value in second.state_dict().values())


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_an_inner_model_over_other_ranks_keeps_its_context(transport):
    """One context holds all of the inner model, whose ranks are not the outer one's."""
    inner = zshard.FSDP(make(Stack), transport=transport, auto_wrap_policy={torch.nn.Linear})
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    outer = zshard.FSDP(torch.nn.Sequential(inner), process_group=alone)
    outer(floats(dist.get_rank(), 0)).square().mean().backward()
    norm = inner.clip_grad_norm_(1.0)
    contexts = {id(state.model) for _, state in units_of(inner)}
    assert len(contexts) == 1
    assert inner.metrics()["grad_norm"] == float(norm)
