"""FSDP(wire=...): gradients and parameters that cross hosts in fewer bytes, compared with the same
arithmetic in torch (tests/lib/wires.py).

Shards stay exact, and forward and backward compute with a function of them: so a plain model of
rounded parameters is bit-identical, on all ranks, no matter what happens in between.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import case_of, curve, hosts_of, on_hosts
from models import CASES, loss_of, make
from rows import all_refused
from scenario import Scenario
from spawn import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from wires import (
    NUMEL,
    Model,
    Products,
    Seen,
    decoded,
    gradient,
    reduced,
    steps_after,
    steps_as,
    steps_with_a_scale,
    weights,
)

import zshard
from zshard import FSDP, Wire

ROUNDED = Wire(parameters="bf16")  # elementwise, so a reference needs no shards


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


@on_ranks(2)
def test_nothing_is_encoded_on_one_host():
    model = wrap(None, transport="shm")  # "auto" is the choice of the group's first model
    grads = reduced(model, gradient(dist.get_rank()))
    assert "wire='bf16' has no effect" in model.summary()
    assert_same(grads, (gradient(0) + gradient(1)) / 2, "the gradients")


LOW = zshard.MixedPrecision(torch.bfloat16)


# --- values ---------------------------------------------------------------------------------------


def check_values(*sizes, dtype=torch.float32, **options):
    """Check the parameters of a forward, the shards, and the values that a script may read."""
    options = {"auto_wrap_policy": None, "timeout": 60, "wire": ROUNDED, **options}
    exact = weights().to(dtype)
    low = exact.bfloat16() if "mixed_precision" in options else exact
    with hosts_of(*sizes) as group:
        model = FSDP(Seen(dtype), process_group=group, **options)
        for _ in range(2):
            model(torch.ones(NUMEL, dtype=low.dtype)).backward()
        assert_same(model.seen, [decoded(low)] * 2, "in forwards")
        assert_same(model.state_dict(), {"weight": exact}, "in state_dict()")
        with FSDP.summon_full_params(model):
            assert_same(model.weight.detach(), exact, "summoned")
        codes = low.dtype is torch.float32
        words = f"parameters cross hosts as {'bf16' if codes else 'they are'}"
        assert words in model.summary()


VALUES = {
    "shard_grad_op": {"strategy": "shard_grad_op"},
    "float16": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16},
    "float64": {"dtype": torch.float64},
    "mixed precision": {"mixed_precision": LOW},
    "on a disk": {},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("sizes", [(2, 2), (1, 1, 1, 1)])
@on_ranks(4)
def test_forward_computes_with_decoded_parameters(name, sizes, tmp_path):
    disk = {"offload": zshard.Offload(directory=str(tmp_path))} if name == "on a disk" else {}
    check_values(*sizes, **VALUES[name], **disk)


@on_ranks(4)
def test_fully_shard_takes_it():
    with on_hosts(2):
        model = zshard.fully_shard(Seen(), wire=ROUNDED)
        model(torch.ones(NUMEL)).backward()
    assert_same(model.seen[0], decoded(weights()), "in a forward")
    assert "parameters cross hosts as bf16" in model.summary()


# --- training -------------------------------------------------------------------------------------

STEPS = 3


def in_plain_torch(case):
    """Return this rank's losses, and the final parameters, of a plain model that computes with
    rounded parameters."""
    exact, low = make(case.make), make(case.make)
    optimizer = torch.optim.SGD(exact.parameters(), 0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        with torch.no_grad():
            for ours, kept in zip(low.parameters(), exact.parameters(), strict=True):
                ours.copy_(kept.bfloat16().float())
        grads = []
        for rank in range(4):
            low.zero_grad()
            loss = loss_of(low(case.batch(step, rank)))
            loss.backward()
            grads.append([p.grad.clone() for p in low.parameters() if p.requires_grad])
            if rank == dist.get_rank():
                losses.append(loss.item())
        trained = (kept for kept in exact.parameters() if kept.requires_grad)
        for kept, *each in zip(trained, *grads, strict=True):
            kept.grad = ((each[0] + each[1]) + (each[2] + each[3])) / 4
        optimizer.step()
    return losses, exact.state_dict()


def recompute(model):
    """Checkpoint what its children compute."""
    for child in model.modules():
        if isinstance(child, nn.Linear):
            inner = child.forward
            child.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)


def check_training(name, variant="", **options):
    """Fail unless losses and weights are the plain model's."""
    case = CASES[name]
    with hosts_of(2, 2) as group:
        made = make(case.make)
        if variant == "checkpoint":
            recompute(made)
        options = {"auto_wrap_policy": case.policy, "timeout": 60, "wire": ROUNDED, **options}
        model = FSDP(made, process_group=group, **options)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            before = model.state_dict()
            loss = loss_of(model(case.batch(step, dist.get_rank())))
            if variant == "read":
                assert_same(model.state_dict(), before, "after a forward")
                with FSDP.summon_full_params(model):
                    assert_same(dict(model.named_parameters()), before, "summoned")
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert_same((losses, model.state_dict()), in_plain_torch(case), "after training")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("keep", [False, True, "auto"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("name", ["mlp", "net", "tied", "frozen"])
@on_ranks(4)
def test_training_matches_rounded_parameters(name, strategy, keep):
    check_training(name, strategy=strategy, keep_gathered=keep)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("variant", ["checkpoint", "read"])
@on_ranks(4)
def test_recomputing_and_reading_change_nothing(variant, keep):
    check_training("mlp", variant, keep_gathered=keep)


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_full", "zero1", "no_shard"])
@on_ranks(4)
def test_gathers_within_a_host_are_exact(strategy):
    """wire changes nothing where no gather crosses hosts."""
    way = (strategy, 2, 2) if strategy.startswith("hybrid") else (strategy, None)
    states = []
    with on_hosts(2):
        for wire in (None, ROUNDED):
            options = {"timeout": 60, "wire": wire}
            training = Scenario("mlp", way, "torch.SGD", options=options).sharded(2)
            words = "parameters cross hosts as they are"
            assert wire is None or words in training.model.summary()
            states.append(training.state())
    assert_same(*states, "with and without a wire")


# --- one rank alone, and full parameters ----------------------------------------------------------


@on_ranks(4)
def test_lone_evaluation_uses_the_same_values():
    """One rank evaluates alone in each step, after all have."""
    case = CASES["mlp"]
    with hosts_of(2, 2) as group:
        model = case_of(group, "mlp", wire="bf16")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            with torch.no_grad():
                together = model(case.batch(9, step))
                if dist.get_rank() == step:
                    assert_same(model(case.batch(9, step)), together, "alone")
            loss_of(model(case.batch(step, dist.get_rank()))).backward()
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(4)
def test_conflicting_unsharding_is_refused():
    words = "param_dtype or wire"
    with hosts_of(2, 2) as group:
        model = FSDP(Seen(), process_group=group, auto_wrap_policy=None, timeout=60, wire=ROUNDED)
        model.unshard()
        assert_same(model.weight.detach(), weights().bfloat16().float(), "unsharded")
        summon = FSDP.summon_full_params(model).__enter__
        calls = {"summon": summon, "state_dict": model.state_dict}
        all_refused({name: (call, RuntimeError, words) for name, call in calls.items()})
        model.reshard()
        model(torch.ones(NUMEL)).backward()
        with FSDP.summon_full_params(model), pytest.raises(RuntimeError, match=words):
            model(torch.ones(NUMEL))
        assert_same(model.state_dict(), {"weight": weights()}, "at the end")
