"""FSDP(wire=...): gradients that cross hosts in fewer bytes, compared with the same arithmetic in
torch (tests/lib/wires.py).
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from groups import curve, hosts_of, mesh_of, on_hosts
from models import CASES, loss_of, make
from scenarios import message_of
from spawn import on_ranks
from wires import (
    Model,
    Products,
    gradient,
    reduced,
    steps_after,
    steps_as,
    steps_with_a_scale,
)

import zshard
from zshard import FSDP


def wrap(group, wire="bf16", strategy="full_shard", **options):
    options.setdefault("process_group", group)
    return FSDP(
        Products(), strategy=strategy, auto_wrap_policy=None, timeout=60, wire=wire, **options
    )


def arithmetic(sizes, strategy):
    """Return which of several steps are bit-identical to the model's."""
    with hosts_of(*sizes) as group:
        model = wrap(group, strategy=strategy)
        assert "gradients cross hosts as bf16" in model.summary()
        beside = Model(len(sizes), sizes[0])
        return steps_as(beside, model, strategy)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "zero1", "no_shard"])
def test_bit_identical_to_reference_arithmetic(pool4, strategy):
    assert pool4.run(arithmetic, (2, 2), strategy) == [[True] * 4] * 4


def test_one_rank_per_host(pool2):
    assert pool2.run(arithmetic, (1, 1), "full_shard") == [[True] * 4] * 2


def test_four_hosts(pool4):
    assert pool4.run(arithmetic, (1, 1, 1, 1), "full_shard") == [[True] * 4] * 4


# --- replicas -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2"])
@on_ranks(4)
def test_replicas_stay_the_same(strategy):
    """Return whether ranks with the same shard still have the same values, and the losses."""
    case = CASES["net"]
    with on_hosts(2):
        model = FSDP(
            make(case.make),
            strategy=strategy,
            auto_wrap_policy=case.policy,
            device_mesh=mesh_of(2, 2),
            wire="bf16",
            timeout=60,
        )
        assert "gradients cross hosts as bf16" in model.summary()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        losses = []
        for step in range(5):
            loss = loss_of(model(case.batch(step, dist.get_rank())))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        mine = torch.cat([zshard.to_local(p.detach()).flatten() for p in model.parameters()])
    parts = [None] * 4
    dist.all_gather_object(parts, mine)
    same = torch.equal(parts[0], parts[2]) and torch.equal(parts[1], parts[3])
    assert same
    assert all(map(math.isfinite, losses))


# --- rounding errors ------------------------------------------------------------------------------


def mean_of_many(steps):
    """Return the largest errors of one step's gradient and of the mean of many, and their
    bounds."""
    with hosts_of(2, 2) as group:
        model = wrap(group)
        exact = sum(gradient(rank) for rank in range(4)) / 4
        each = [reduced(model, gradient(dist.get_rank())) for _ in range(steps)]
    first, mean = each[0], torch.stack(each).double().mean(0)
    return (first - exact).abs().max().item(), (mean - exact).abs().max().item()


def test_rounding_errors_do_not_accumulate(pool4):
    steps = 32
    for first, mean in pool4.run(mean_of_many, steps):
        assert first > 1e-4
        assert mean < 3 * first / steps


def scaled():
    with hosts_of(2, 2) as group:
        return steps_with_a_scale(lambda: wrap(group))


def test_residuals_follow_the_loss_scale(pool4):
    assert pool4.run(scaled) == [[True] * 4] * 4


def skipped(bad):
    with hosts_of(2, 2) as group:
        return steps_after(bad, wrap(group))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_all_ranks_skip_together(pool4, bad):
    assert pool4.run(skipped, bad) == [([2.0, 2.0], True, True)] * 4


@on_ranks(4)
def test_no_sync_gradients_are_sent_once():
    """no_sync(), and a rank without gradients, give the same as the sum in one round."""
    with hosts_of(2, 2) as group:
        model, beside = wrap(group), Model(2, 2)
        rank = dist.get_rank()
        with model.no_sync():
            model(gradient(rank, 0)).backward()
        model(gradient(rank, 1)).backward()
        local = zshard.to_local(model.weight.grad).flatten().clone()
        expected = beside.reduce([gradient(r, 0) + gradient(r, 1) for r in range(4)])
        begin = zshard.shard_info(model.weight)["begin"]
    assert torch.equal(local, expected[begin : begin + local.numel()])


# --- training -------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_loss_decreases_as_in_float32(pool4):
    exact = pool4.run(curve, None, 20, 1.0)[0]
    coded = pool4.run(curve, "bf16", 20, 1.0)[0]
    assert coded != exact
    assert coded[-1] < exact[0] - 0.9 * (exact[0] - exact[-1])
    assert max(abs(a - b) for a, b in zip(coded, exact, strict=True)) < 0.05 * exact[0]


def test_gradients_in_bfloat16_are_summed_before_they_are_coded(pool4):
    low = zshard.MixedPrecision(torch.bfloat16)
    losses = pool4.run(curve, "bf16", 10, 1.0, low)[0]
    assert losses[-1] < losses[0]


# --- sizes ----------------------------------------------------------------------------------------


def sizes(wire, strategy):
    """Return where the prediction, the model's report and the memory after two steps differ."""
    told = zshard.predict_memory(
        Products(),
        4,
        strategy=strategy,
        auto_wrap_policy=None,
        transport="hosts",
        local_world_size=2,
        optimizer=None,
        wire=wire,
    )
    with hosts_of(2, 2) as group:
        model = wrap(group, wire, strategy)
        predicted = model.memory("predicted")
        for step in range(2):
            model(gradient(dist.get_rank(), step)).backward()
        now = model.memory("now")
    return told["transport"], predicted["transport"], now["transport"]


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_memory_is_as_predicted(pool4, strategy):
    exact, coded = (pool4.run(sizes, wire, strategy) for wire in (None, "bf16"))
    for (told, predicted, now), before in zip(coded, exact, strict=True):
        assert told == predicted > before[0]
        assert now - before[2] == told - before[0]


# --- unsupported cases ----------------------------------------------------------------------------


def differing():
    with hosts_of(2, 2) as group:
        wire = "bf16" if dist.get_rank() == 1 else None
        return message_of(lambda: wrap(group, wire), zshard.DivergenceError)


def test_different_settings_are_an_error(pool4):
    for message in pool4.run(differing):
        assert "wire" in message
        assert "bf16" in message


def refusals():
    with hosts_of(2, 2) as group:
        return (
            message_of(lambda: wrap(group, "int8"), ValueError),
            message_of(lambda: wrap(group, transport="c10d"), NotImplementedError),
        )


def test_unsupported_cases_are_refused(pool4):
    for name, transport in pool4.run(refusals):
        assert "'bf16', None" in name
        assert "transport='hosts'" in transport


@on_ranks(2)
def test_nothing_is_encoded_on_one_host():
    model = wrap(None, transport="shm")  # "auto" is what the group's first model took
    grads = reduced(model, gradient(dist.get_rank()))
    exact = (gradient(0) + gradient(1)) / 2
    assert "wire='bf16' has no effect" in model.summary()
    assert torch.equal(grads, exact)


def copied():
    """A copy has its own residuals."""
    with hosts_of(2, 2) as group:
        model, beside = wrap(group), Model(2, 2)
        reduced(model, gradient(dist.get_rank(), 1))
        twin = copy.deepcopy(model)
        expected = beside.reduce([gradient(rank) for rank in range(4)])
        return torch.equal(reduced(twin, gradient(dist.get_rank())), expected)


def test_copies_are_encoded(pool4):
    assert pool4.run(copied) == [True] * 4
