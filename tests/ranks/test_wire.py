"""FSDP(wire=...): gradients that cross hosts in fewer bytes, compared with the same arithmetic in
torch (tests/lib/wires.py); and the arguments, and what is refused, of parameters, too.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import curve, hosts_of, on_hosts
from rows import all_refused
from scenario import Scenario
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
from zshard import FSDP, Wire

ROUNDED = Wire(parameters="bf16")


def wrap(group, wire="bf16", **options):
    options = {"process_group": group, "auto_wrap_policy": None, "timeout": 60, **options}
    return FSDP(Products(), wire=wire, **options)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "zero1", "no_shard"])
@on_ranks(4)
def test_bit_identical_to_reference_arithmetic(strategy):
    with hosts_of(2, 2) as group:
        model = wrap(group, strategy=strategy)
        assert "gradients cross hosts as bf16" in model.summary()
        assert steps_as(Model(2, 2), model, strategy) == [True] * 4


@on_ranks(2, 4)
def test_hosts_with_one_rank_each():
    hosts = dist.get_world_size()
    with hosts_of(*[1] * hosts) as group:
        assert steps_as(Model(hosts, 1), wrap(group), "full_shard") == [True] * 4


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2"])
@on_ranks(4)
def test_replicas_stay_the_same(strategy):
    """Ranks with the same shard still have the same values."""
    options = {"wire": "bf16", "timeout": 60}
    with on_hosts(2):
        scenario = Scenario("net", (strategy, 2, 2), "torch.AdamW", steps=5, options=options)
        training = scenario.sharded(None)
        assert "gradients cross hosts as bf16" in training.model.summary()
        assert all(map(math.isfinite, training.losses))
        local = [zshard.to_local(p.detach()).flatten() for p in training.model.parameters()]
    parts = [None] * 4
    dist.all_gather_object(parts, torch.cat(local))
    assert torch.equal(parts[0], parts[2]) and torch.equal(parts[1], parts[3])


# --- rounding errors ------------------------------------------------------------------------------


@on_ranks(4)
def test_rounding_errors_do_not_accumulate():
    """The error of the mean of many steps is that of one step, divided by their number."""
    steps = 32
    with hosts_of(2, 2) as group:
        model = wrap(group)
        exact = sum(gradient(rank) for rank in range(4)) / 4
        each = [reduced(model, gradient(dist.get_rank())) for _ in range(steps)]
    first = (each[0] - exact).abs().max().item()
    mean = (torch.stack(each).double().mean(0) - exact).abs().max().item()
    assert first > 1e-4
    assert mean < 3 * first / steps


@on_ranks(4)
def test_residuals_follow_the_loss_scale():
    with hosts_of(2, 2) as group:
        assert steps_with_a_scale(lambda: wrap(group)) == [True] * 4


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@on_ranks(4)
def test_all_ranks_skip_together(bad):
    with hosts_of(2, 2) as group:
        assert steps_after(bad, wrap(group)) == ([2.0, 2.0], True, True)


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


@on_ranks(4)
def test_copies_have_their_own_residuals():
    with hosts_of(2, 2) as group:
        model, beside = wrap(group), Model(2, 2)
        reduced(model, gradient(dist.get_rank(), 1))
        twin = copy.deepcopy(model)
        expected = beside.reduce([gradient(rank) for rank in range(4)])
        assert torch.equal(reduced(twin, gradient(dist.get_rank())), expected)


# --- training -------------------------------------------------------------------------------------


@on_ranks(4)
def test_gradients_in_bfloat16_are_summed_before_they_are_coded():
    losses = curve("bf16", 10, 1.0, zshard.MixedPrecision(torch.bfloat16))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(4)
def test_memory_is_as_predicted(strategy):
    """By predict_memory() and by the model; what codes add is in the memory after two steps."""
    predicted, now = [], []
    options = {"strategy": strategy, "auto_wrap_policy": None, "transport": "hosts"}
    for wire in (None, "bf16"):
        predicted.append(
            zshard.predict_memory(
                Products(), 4, **options, local_world_size=2, optimizer=None, wire=wire
            )["transport"]
        )
        with hosts_of(2, 2) as group:
            model = wrap(group, wire, strategy=strategy)
            assert wire is None or model.memory("predicted")["transport"] == predicted[-1]
            for step in range(2):
                model(gradient(dist.get_rank(), step)).backward()
            now.append(model.memory("now")["transport"])
    assert predicted[1] > predicted[0]
    assert now[1] - now[0] == predicted[1] - predicted[0]


# --- settings -------------------------------------------------------------------------------------

OTHERS = [("bf16", None, "bf16"), (ROUNDED, None, "parameters="), ("bf16", Wire("bf16"), "")]


@pytest.mark.parametrize(("first", "second", "words"), OTHERS)
@on_ranks(4)
def test_different_settings_are_an_error(first, second, words):
    with hosts_of(2, 2) as group, pytest.raises(zshard.DivergenceError, match=f"wire.*{words}"):
        wrap(group, first if dist.get_rank() == 1 else second)


@on_ranks(4)
def test_unsupported_cases_are_refused():
    with hosts_of(2, 2) as group:
        text = "Wire: gradients must be one of 'bf16', None, got 'int8'"
        rows = {
            "a name": (lambda: wrap(group, "int8"), ValueError, "'bf16', None"),
            "gradients": (lambda: Wire("int8"), ValueError, text),
            "parameters": (lambda: Wire(None, "fp8"), ValueError, "must be one of 'bf16', None"),
            "a dtype": (lambda: Wire(torch.bfloat16), ValueError, "must be one of 'bf16', None"),
            "a number": (
                lambda: zshard.predict_memory(Products(), 4, wire=8),
                ValueError,
                "'bf16', None, got 8",
            ),
            "a transport": (
                lambda: wrap(group, transport="c10d"),
                NotImplementedError,
                "transport='hosts'",
            ),
        }
        all_refused(rows)


def test_a_name_stands_for_both():
    both, named = (
        zshard.predict_memory(Products(), 4, local_world_size=2, wire=wire)
        for wire in (Wire("bf16", "bf16"), "bf16")
    )
    assert both == named


@on_ranks(2)
def test_nothing_is_encoded_on_one_host():
    model = wrap(None, transport="shm")  # "auto" is what the group's first model took
    grads = reduced(model, gradient(dist.get_rank()))
    assert "wire='bf16' has no effect" in model.summary()
    assert_same(grads, (gradient(0) + gradient(1)) / 2, "the gradients")
