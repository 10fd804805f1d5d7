"""The memory reserved before the first step is what steps use: slots, buckets, the transport's
areas.

The plan (csrc/engine/plan.h) simulates a step, and the real step verifies it: afterwards slots and
buckets have as many bytes as before, and nothing has been mapped.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from groups import mesh_of
from models import CASES, COMBINATIONS, Block, Nested, Net, loss_of, make, wrapped
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, _core

BF16 = zshard.MixedPrecision(torch.bfloat16)
PREFETCH = (
    {},
    {"forward_prefetch": True},
    {"backward_prefetch": None},
    {"forward_prefetch": True, "limit_all_gathers": False},
)
PARTS = ("shards", "kept", "grads", "slots", "buckets")


def engine_of(model):
    return model._zshard_state.unit.engine


def parts_of(held):
    return {name: held[name] for name in PARTS}


def gives_away(model):
    """Are its gradients full ones, which belong to the script?"""
    unit = unit_of(model)
    return unit.strategy == "no_shard" or dist.get_world_size() == 1


def step(model, case, number, optimizer=None):
    model.zero_grad()  # first: gradients are there afterwards
    loss_of(model(case.batch(number, dist.get_rank()))).backward()
    if optimizer is not None:
        optimizer.step()


def differences(model, case, steps=5):
    """Return where the prediction, the memory after wrapping, and the memory after each step are
    not equal; and how often memory was mapped in these steps."""
    engine = engine_of(model)
    model.zero_grad()
    wanted, before = parts_of(engine.predict(False)), _core.mappings()
    if gives_away(model):
        wanted["grads"] = 0
    found = [f"after wrapping: {parts_of(engine.memory())}, not {wanted} without gradients"]
    found *= parts_of(engine.memory()) != {**wanted, "grads": 0}
    spare = spare_of(model)
    for number in range(steps):
        step(model, case, number)
        held = parts_of(engine.memory())
        if spare and wanted["buckets"] < held["buckets"] <= wanted["buckets"] + spare:
            before, spare, wanted = before + 1, 0, {**wanted, "buckets": held["buckets"]}
        if held != wanted:
            found.append(f"after step {number + 1}: {held}, not {wanted}")
    if _core.mappings() != before:
        found.append(f"memory was mapped {_core.mappings() - before} times")
    return found


def spare_of(model):
    """Return the bytes of one bucket over shm, where a rank takes a third one when all wait for
    each other, which happens occasionally on a loaded machine."""
    state = model._zshard_state
    if state.comms.all.transport != "shm":
        return 0
    return max(-(-u.bytes["bucket"] // 4096) * 4096 for u in map(unit_of, FSDP.fsdp_modules(model)))


def unit_of(model):
    return model._zshard_state.unit


def all_differences(name, precision):
    case, found = CASES[name], {}
    for combination in COMBINATIONS:
        for options in PREFETCH:
            model = wrapped(
                case.make,
                combination,
                auto_wrap_policy=case.policy,
                mixed_precision=precision,
                **options,
            )
            wrong = differences(model, case)
            if wrong:
                found[(*combination, str(options))] = wrong
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", [None, BF16], ids=["own dtype", "bf16"])
@pytest.mark.parametrize("name", ["net", "tied", "conv", "frozen", "attention", "one unit"])
def test_steps_use_exactly_the_reserved_memory(pool2, name, precision):
    """Nested units, tied weights, frozen ones; each strategy, transport and kind of prefetch."""
    assert pool2.run(all_differences, name, precision) == [{}, {}]


@on_ranks(3)
def test_three_ranks():
    name = "net"
    case = CASES[name]
    models = [wrapped(case.make, each, auto_wrap_policy=case.policy) for each in COMBINATIONS]
    assert [differences(model, case, steps=3) for model in models] == [[]] * len(COMBINATIONS)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("precision", [None, BF16], ids=["own dtype", "bf16"])
@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("name", ["net", "frozen"])
@on_ranks(2)
def test_optimizer_in_backward(name, combination, precision):
    """The same where gradients borrow slots, and the memory once the handle is removed."""
    case = CASES[name]
    model = wrapped(case.make, combination, auto_wrap_policy=case.policy, mixed_precision=precision)
    usual = parts_of(engine_of(model).predict(False))
    usual["grads"] *= not gives_away(model)
    handle = model.optimizer_in_backward(zshard.SGD(model.parameters(), lr=0.01))
    step(model, case, 0)  # the reservation is updated at the start of a pass
    found = differences(model, case)
    borrowed = engine_of(model).memory()["grads"]
    handle.remove()
    step(model, case, 0)
    assert parts_of(engine_of(model).memory()) == usual
    found = found, borrowed
    assert found == ([], 0)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_units_wrapped_one_by_one(transport):
    case, model = CASES["net"], make(Net)
    for module in reversed(list(model.modules())):
        if isinstance(module, Block | Nested):
            FSDP(module, transport=transport, auto_wrap_policy=None)
    FSDP(model, transport=transport, auto_wrap_policy=None)
    assert differences(model, case) == []


class Twice(nn.Module):
    """One block runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(7) for _ in range(3))
        self.again = self.blocks[0]

    def forward(self, x):
        for block in [*self.blocks, self.again]:
            x = block(x)
        return x


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_module_that_runs_twice(combination):
    model = wrapped(Twice, combination, auto_wrap_policy={Block})
    assert differences(model, CASES["mlp"]) == []


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2", "hybrid_full"])
@on_ranks(4)
def test_hybrids(strategy, transport):
    case = CASES["net"]
    model = FSDP(
        make(case.make),
        strategy=strategy,
        transport=transport,
        device_mesh=mesh_of(2, 2),
        auto_wrap_policy=case.policy,
    )
    assert differences(model, case, steps=3) == []


def after_a_change(transport):
    """Return differences where reshard_after_forward changes; bytes in slots before, after, and
    after changing it back."""
    case, found, slots = CASES["net"], [], []
    model = wrapped(case.make, ("full_shard", transport), auto_wrap_policy=case.policy)
    for whole in (True, False, True):
        model.set_reshard_after_forward(whole)
        step(model, case, 0)
        found += differences(model, case, steps=2)
        slots.append(engine_of(model).memory()["slots"])
    return found, slots


def test_changing_settings(pool2):
    for found, (before, during, after) in pool2.run(after_a_change, "c10d"):
        assert found == []
        assert before == after < during  # memory that is no longer needed is freed
    for found, slots in pool2.run(after_a_change, "shm"):
        assert (found, slots) == ([], [0, 0, 0])


class Backwards(Net):
    """Runs its blocks in a different order than they are registered."""

    def forward(self, ids):
        x = self.embed(ids)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_different_forward_order(combination):
    """A model whose forward is not in the order of its modules has the plain one's loss, and the
    same memory after each step."""
    losses = []
    plain = make(Backwards)
    model = wrapped(Backwards, combination, auto_wrap_policy={Block, nn.Embedding})
    for each in (plain, model):
        loss = loss_of(each(CASES["net"].batch(0, 0)))
        loss.backward()
        losses.append(loss.item())
    held = []
    for number in range(3):
        step(model, CASES["net"], number)
        held.append(engine_of(model).memory())
    assert losses[0] == losses[1]
    assert held[0] == held[-1]


def alone(precision):
    model = FSDP(make(Net), mixed_precision=precision, auto_wrap_policy={Block})
    engine, before = engine_of(model), None
    wanted = parts_of(engine.predict(False))
    for number in range(3):
        loss_of(model(CASES["net"].batch(number, 0))).backward()
        before = before or _core.mappings()
    return wanted, parts_of(engine.peak()), _core.mappings() - before


@pytest.mark.parametrize("precision", [None, BF16], ids=["own dtype", "bf16"])
def test_single_rank(precision):
    wanted, held, mapped = alone(precision)
    assert wanted == held
    assert mapped == 0
    assert (held["buckets"] > 0) == (precision is not None)


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_evaluation_needs_no_more_memory(combination):
    """Return how often forwards without gradients, in no particular place, map memory."""
    case = CASES["net"]
    model = wrapped(case.make, combination, auto_wrap_policy=case.policy)
    before = _core.mappings()
    for number in range(4):
        no_grad = torch.no_grad() if number % 2 == 0 else contextlib.nullcontext()
        with no_grad:
            loss = loss_of(model(case.batch(number, dist.get_rank())))
        if loss.requires_grad:
            loss.backward()
    assert _core.mappings() - before == 0
