"""The memory reserved before the first step is what steps use: slots, buckets, the transport's
areas.

The plan (csrc/engine/plan.h) simulates a step, and the real step verifies it: afterwards slots and
buckets have the same number of bytes as before, and nothing has been mapped.

Forward kernels see strides, so a forward is bit-identical to DDP's if it sees the strides from
before wrapping. Shards, state dicts and files are row-major in any case.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import mesh_of
from models import (
    CASES,
    COMBINATIONS,
    Block,
    Case,
    Conv,
    Nested,
    Net,
    ddp,
    loss_of,
    make,
    wrapped,
)
from rows import all_rows
from scenarios import unit_of, units_of
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
    return unit_of(model).engine


def parts_of(held):
    return {name: held[name] for name in PARTS}


def gives_away(model):
    """Are its gradients full ones, which belong to the script?"""
    return unit_of(model).strategy == "no_shard" or dist.get_world_size() == 1


def case_of(name, combination, **options):
    case = CASES[name]
    return wrapped(case.make, combination, auto_wrap_policy=case.policy, **options)


def step(model, case, number):
    model.zero_grad()  # first: gradients are there afterwards
    loss_of(model(case.batch(number, dist.get_rank()))).backward()


def check_plan(model, case, steps=5):
    """The prediction, the memory after wrapping, and the memory after each step are equal; and none
    is mapped in these steps."""
    engine = engine_of(model)
    model.zero_grad()
    wanted, before = parts_of(engine.predict(False)), _core.mappings()
    if gives_away(model):
        wanted["grads"] = 0
    assert parts_of(engine.memory()) == {**wanted, "grads": 0}, "after wrapping"
    spare = spare_of(model)
    for number in range(steps):
        step(model, case, number)
        held = parts_of(engine.memory())
        if spare and wanted["buckets"] < held["buckets"] <= wanted["buckets"] + spare:
            before, spare, wanted = before + 1, 0, {**wanted, "buckets": held["buckets"]}
        assert held == wanted, f"after step {number + 1}"
    assert _core.mappings() == before


def spare_of(model):
    """Return the bytes of one bucket over shm, where a rank takes a third one when all wait for
    each other, which happens occasionally on a loaded machine."""
    if model._zshard_state.comms.all.transport != "shm":
        return 0
    return max(-(-unit.bytes["bucket"] // 4096) * 4096 for unit in units_of(model))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", [None, BF16], ids=["own dtype", "bf16"])
@pytest.mark.parametrize("name", ["net", "tied", "conv", "frozen", "attention", "one unit"])
@on_ranks(2)
def test_steps_use_exactly_the_reserved_memory(name, precision):
    """Nested units, tied weights, frozen ones; each strategy, transport and kind of prefetch."""
    with all_rows() as row:
        for combination in COMBINATIONS:
            for options in PREFETCH:
                with row(combination, options):
                    model = case_of(name, combination, mixed_precision=precision, **options)
                    check_plan(model, CASES[name])


@on_ranks(3)
def test_three_ranks():
    for combination in COMBINATIONS:
        check_plan(case_of("net", combination), CASES["net"], steps=3)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("precision", [None, BF16], ids=["own dtype", "bf16"])
@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("name", ["net", "frozen"])
@on_ranks(2)
def test_optimizer_in_backward(name, combination, precision):
    """The same where gradients borrow slots, and the memory once the handle is removed."""
    case, model = CASES[name], case_of(name, combination, mixed_precision=precision)
    usual = parts_of(engine_of(model).predict(False))
    usual["grads"] *= not gives_away(model)
    handle = model.optimizer_in_backward(zshard.SGD(model.parameters(), lr=0.01))
    step(model, case, 0)  # the reservation is updated at the start of a pass
    check_plan(model, case)
    assert engine_of(model).memory()["grads"] == 0
    handle.remove()
    step(model, case, 0)
    assert parts_of(engine_of(model).memory()) == usual


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_units_wrapped_one_by_one(transport):
    model = make(Net)
    for module in reversed(list(model.modules())):
        if isinstance(module, Block | Nested):
            FSDP(module, transport=transport, auto_wrap_policy=None)
    FSDP(model, transport=transport, auto_wrap_policy=None)
    check_plan(model, CASES["net"])


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2", "hybrid_full"])
@on_ranks(4)
def test_hybrids(strategy, transport):
    options = {"device_mesh": mesh_of(2, 2)}
    check_plan(case_of("net", (strategy, transport), **options), CASES["net"], steps=3)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_changing_settings(transport):
    """If reshard_after_forward changes, slots that are no longer needed are freed."""
    model, slots = case_of("net", ("full_shard", transport)), []
    for reshards in (True, False, True):
        model.set_reshard_after_forward(reshards)
        step(model, CASES["net"], 0)
        check_plan(model, CASES["net"], steps=2)
        slots.append(engine_of(model).memory()["slots"])
    before, during, after = slots
    assert before == after < during if transport == "c10d" else slots == [0, 0, 0]


@pytest.mark.parametrize("precision", [None, BF16], ids=["own dtype", "bf16"])
def test_single_rank(precision):
    model = FSDP(make(Net), mixed_precision=precision, auto_wrap_policy={Block})
    engine, before = engine_of(model), None
    wanted = parts_of(engine.predict(False))
    for number in range(3):
        loss_of(model(CASES["net"].batch(number, 0))).backward()
        before = before or _core.mappings()
    held = parts_of(engine.peak())
    assert wanted == held and _core.mappings() == before
    assert (held["buckets"] > 0) == (precision is not None)


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_evaluation_needs_no_more_memory(combination):
    """Forwards without gradients, in no particular place, map none."""
    case, model = CASES["net"], case_of("net", combination)
    before = _core.mappings()
    for number in range(4):
        with torch.set_grad_enabled(number % 2 == 1):
            loss = loss_of(model(case.batch(number, dist.get_rank())))
        if loss.requires_grad:
            loss.backward()
    assert _core.mappings() == before


# --- parameters with another dimension order in memory: channels_last, transposed -----------------

SEEN: dict[str, tuple[int, ...]] = {}


class Seeing(nn.Module):
    """Records the strides that a forward sees; transposed weights, and a convolution of one
    pixel."""

    def __init__(self):
        super().__init__()
        self.point, self.conv = nn.Conv2d(3, 3, 1), Conv()
        self.conv.head.weight = nn.Parameter(torch.randn(5, 3).t())

    def forward(self, x):
        SEEN.update({name: param.stride() for name, param in self.named_parameters()})
        return self.conv(self.point(x))


def last():
    return make(Seeing).to(memory_format=torch.channels_last)


CASE = Case(last, lambda generator: torch.randn(4, 3, 7, 7, generator=generator))


def run(model, optimizer):
    """Return losses of steps, one of them with accumulation, and an evaluation's result."""
    rank, results = dist.get_rank(), []
    for step in range(3):
        optimizer.zero_grad()
        if step == 1:
            with model.no_sync():
                loss_of(model(CASE.batch(7, rank))).backward()
        loss = loss_of(model(CASE.batch(step, rank)))
        loss.backward()
        optimizer.step()
        results.append(loss.item())
    with torch.no_grad():
        return [*results, model.eval()(CASE.batch(9, rank)).sum().item()]


STRATEGIES = ("full_shard", "shard_grad_op", "zero1", "no_shard", "hybrid_shard", "hybrid_full")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_forward_sees_the_plain_models_strides(strategy, transport):
    """Numbers, strides and the optimizer's state are DDP's."""
    plain = last()
    reference = ddp(plain)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.1)
    losses = run(reference, theirs)
    strides = {name: param.stride() for name, param in plain.named_parameters()}
    options = {"device_mesh": mesh_of(1, 2)} if strategy.startswith("hybrid") else {}
    model = FSDP(last(), strategy=strategy, transport=transport, auto_wrap_policy=None, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert_same(run(model, optimizer), losses, "the losses")
    assert_same(SEEN, strides, "strides in forward")
    # BatchNorm's buffers are each rank's own in both
    assert_same(model.state_dict(), plain.state_dict(), "the state")
    states = (each.state_dict()["state"] for each in (optimizer, theirs))
    assert_same(*states, "the optimizer's state")
    with FSDP.summon_full_params(model), torch.no_grad():
        summoned = {name: param.stride() for name, param in model.named_parameters()}
        assert_same(summoned, strides, "summoned strides")
        for each in (model, plain):
            each.conv.stages[0][0].weight[:, 1] *= 2
    assert_same(model.state_dict(), plain.state_dict(), "the state after a write")
    model.load_state_dict(last().state_dict())
    assert_same(model.state_dict(), last().state_dict(), "the loaded state")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("precision", [None, zshard.MixedPrecision(torch.bfloat16)], ids=str)
@on_ranks(2)
def test_predicted_slots(transport, precision):
    options = {"transport": transport, "mixed_precision": precision}
    check_plan(FSDP(last(), auto_wrap_policy={nn.Conv2d}, **options), CASE, steps=3)
