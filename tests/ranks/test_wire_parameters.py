"""FSDP(wire=...): parameters that cross hosts in fewer bytes, compared with the same arithmetic in
torch.

Shards stay exact, and forward and backward compute with a function of them: so a plain model of
rounded parameters is bit-identical, on all ranks, whatever happens in between.
"""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.distributed as dist
from compare import differences
from groups import case_of, curve, hosts_of, mesh_of, on_hosts
from models import CASES, loss_of, make
from scenarios import message_of
from spawn import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from wires import NUMEL, Products, Seen, decoded, weights

import zshard
from zshard import FSDP, Wire

LOW = zshard.MixedPrecision(torch.bfloat16)
ROUNDED = Wire(parameters="bf16")  # elementwise, so a reference needs no shards


# --- values ---------------------------------------------------------------------------------------


def seen(sizes, dtype=torch.float32, options=None):
    """Return differences in the parameters of a forward, in the shards, and in what a script may
    read."""
    options = options or {}
    with hosts_of(*sizes) as group:
        model = FSDP(
            Seen(dtype),
            process_group=group,
            auto_wrap_policy=None,
            timeout=60,
            wire=ROUNDED,
            **options,
        )
        exact = weights().to(dtype)
        low = exact.bfloat16() if "mixed_precision" in options else exact
        rounded = decoded(low)
        for _ in range(2):
            model(torch.ones(NUMEL, dtype=low.dtype)).backward()
        found = differences(
            {str(i): each for i, each in enumerate(model.seen)}, {"0": rounded, "1": rounded}
        )
        found += differences(model.state_dict(), {"weight": exact})
        with zshard.FSDP.summon_full_params(model):
            found += differences({"summoned": model.weight.detach()}, {"summoned": exact})
        codes = low.dtype is torch.float32
        words = f"parameters cross hosts as {'bf16' if codes else 'they are'}"
        return found + ([] if words in model.summary() else [model.summary()])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sizes", [(2, 2), (1, 1, 1, 1)])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_forward_computes_with_decoded_parameters(pool4, sizes, strategy):
    assert pool4.run(seen, sizes, torch.float32, {"strategy": strategy}) == [[]] * 4


def test_two_ranks_on_hosts(pool2):
    assert pool2.run(seen, (1, 1)) == [[]] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_of_other_dtypes(pool4, dtype):
    assert pool4.run(seen, (2, 2), dtype) == [[]] * 4


def test_cast_parameters_are_encoded(pool4):
    assert pool4.run(seen, (2, 2), torch.float32, {"mixed_precision": LOW}) == [[]] * 4


def test_parameters_on_a_disk(pool4, tmp_path):
    options = {"offload": zshard.Offload(directory=str(tmp_path))}
    assert pool4.run(seen, (2, 2), torch.float32, options) == [[]] * 4


# --- training -------------------------------------------------------------------------------------

STEPS = 3


def in_plain_torch(case, rounds=True):
    """Return this rank's losses, and the final parameters, of a plain model that computes with
    rounded parameters."""
    exact, low = make(case.make), make(case.make)
    optimizer = torch.optim.SGD(exact.parameters(), 0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        with torch.no_grad():
            for ours, kept in zip(low.parameters(), exact.parameters(), strict=True):
                ours.copy_(kept.bfloat16().float() if rounds else kept)
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


def trained(name, strategy, options, variant=""):
    """Return differences from the plain model."""
    case = CASES[name]
    with hosts_of(2, 2) as group:
        made = make(case.make)
        if variant == "checkpoint":
            recompute(made)
        model = FSDP(
            made,
            process_group=group,
            strategy=strategy,
            auto_wrap_policy=case.policy,
            timeout=60,
            wire=ROUNDED,
            **options,
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        losses, found = [], []
        for step in range(STEPS):
            optimizer.zero_grad()
            before = model.state_dict()
            loss = loss_of(model(case.batch(step, dist.get_rank())))
            if variant == "read":
                found += differences(model.state_dict(), before)
                with FSDP.summon_full_params(model):
                    found += differences(dict(model.named_parameters()), before)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        expected_losses, state = in_plain_torch(case)
        found += differences(model.state_dict(), state)
        return found + ([] if losses == expected_losses else [(losses, expected_losses)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("keep", [False, True, "auto"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("name", ["mlp", "net", "tied", "frozen"])
def test_training_matches_rounded_parameters(pool4, name, strategy, keep):
    options = {"keep_gathered": keep}
    assert pool4.run(trained, name, strategy, options) == [[]] * 4


@pytest.mark.parametrize("variant", ["checkpoint", "read"])
def test_recomputing_and_reading_change_nothing(pool4, variant):
    for keep in (False, True):
        run = pool4.run(trained, "mlp", "full_shard", {"keep_gathered": keep}, variant)
        assert run == [[]] * 4, keep


@pytest.mark.thorough
def test_prefetch(pool4):
    options = {"forward_prefetch": True, "limit_all_gathers": False}
    assert pool4.run(trained, "net", "full_shard", options) == [[]] * 4


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_full", "zero1", "no_shard"])
@on_ranks(4)
def test_gathers_within_a_host_are_exact(strategy):
    """Return whether wire changes nothing where no gather crosses hosts."""
    options = {"timeout": 60}
    case, found = CASES["mlp"], []
    with on_hosts(2):
        for wire in (None, ROUNDED):
            if strategy.startswith("hybrid"):
                options = {**options, "device_mesh": mesh_of(2, 2)}
            model = FSDP(
                make(case.make),
                strategy=strategy,
                auto_wrap_policy=case.policy,
                wire=wire,
                **options,
            )
            assert wire is None or "parameters cross hosts as they are" in model.summary()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for step in range(2):
                loss_of(model(case.batch(step, dist.get_rank()))).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(model.state_dict())
    assert differences(*found) == []


@pytest.mark.thorough
@pytest.mark.parametrize("wire", ["bf16", ROUNDED])
def test_loss_decreases_as_in_float32(pool4, wire):
    exact, coded = (pool4.run(curve, each, 120)[0] for each in (None, wire))
    assert coded != exact
    assert coded[-1] < exact[0] - 0.9 * (exact[0] - exact[-1])
    assert max(abs(a - b) for a, b in zip(coded, exact, strict=True)) < 0.05 * exact[0]


def shard_fully(wire):
    """Return the parameters in the forward of a fully_shard() unit, and summary()'s text."""
    with on_hosts(2):
        model = zshard.fully_shard(Seen(), wire=wire)
        model(torch.ones(NUMEL)).backward()
    rounded = decoded(weights())
    said = "parameters cross hosts as bf16" in model.summary()
    return differences({"seen": model.seen[0]}, {"seen": rounded}), said


def test_fully_shard_takes_it(pool4):
    assert pool4.run(shard_fully, ROUNDED) == [([], True)] * 4


# --- diverging ranks ------------------------------------------------------------------------------


def evaluated():
    """Return differences between a rank's evaluation while others train, and one of all ranks."""
    case = CASES["mlp"]
    with hosts_of(2, 2) as group:
        model = case_of(group, "mlp", wire="bf16")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        together, alone = {}, {}
        for step in range(3):
            with torch.no_grad():
                together[str(step)] = model(case.batch(9, step))
                if dist.get_rank() == step:
                    alone[str(step)] = model(case.batch(9, step))
            loss_of(model(case.batch(step, dist.get_rank()))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return differences(alone, {key: together[key] for key in alone})


def test_lone_evaluation_uses_the_same_values(pool4):
    assert pool4.run(evaluated) == [[]] * 4


def differing(first, second):
    with hosts_of(2, 2) as group:
        wire = first if dist.get_rank() == 1 else second
        return message_of(
            lambda: FSDP(Products(), process_group=group, auto_wrap_policy=None, wire=wire),
            zshard.DivergenceError,
        )


@pytest.mark.parametrize("first, second", [(ROUNDED, None), ("bf16", Wire("bf16"))])
def test_different_settings_are_an_error(pool4, first, second):
    for message in pool4.run(differing, first, second):
        assert "wire" in message
        assert "parameters=" in message


def refused():
    """Return messages where full parameters are requested in conflicting ways."""
    with hosts_of(2, 2) as group:
        model = FSDP(Seen(), process_group=group, auto_wrap_policy=None, timeout=60, wire=ROUNDED)
        model.unshard()
        unsharded = model.weight.detach().clone()
        messages = [message_of(FSDP.summon_full_params(model).__enter__, RuntimeError)]
        messages.append(message_of(model.state_dict, RuntimeError))
        model.reshard()
        model(torch.ones(NUMEL)).backward()
        with FSDP.summon_full_params(model):
            messages.append(message_of(lambda: model(torch.ones(NUMEL)), RuntimeError))
        same = differences({"weight": unsharded}, {"weight": weights().bfloat16().float()})
        return messages, same + differences(model.state_dict(), {"weight": weights()})


def test_conflicting_unsharding_is_refused(pool4):
    for messages, differ in pool4.run(refused):
        assert not differ
        for message in messages:
            assert "param_dtype or wire" in message


# --- sizes ----------------------------------------------------------------------------------------


def sent(wire):
    """Return the bytes of a step's broadcasts for gathers."""
    with hosts_of(2, 2) as group:
        model = FSDP(
            nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3))),
            process_group=group,
            auto_wrap_policy={nn.Linear},
            wire=wire,
            timeout=60,
        )
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        recording = torch.profiler.profile(record_shapes=True, experimental_config=config)
        with recording as profile, torch.no_grad():
            model(torch.ones(2, 64))
            time.sleep(0.3)  # torch's thread finishes recording after its waiters continue
    moved = [e.input_shapes for e in profile.events() if e.name == "gloo:broadcast"]
    return sum(math.prod(shape) for shapes in moved for shape in shapes)


def test_bytes_between_hosts(pool4):
    exact, low = (pool4.run(sent, wire)[0] for wire in (None, "bf16"))
    assert exact == 2 * low > 0


def peaks(wire):
    case = CASES["net"]
    told = zshard.predict_memory(
        make(case.make),
        4,
        auto_wrap_policy=case.policy,
        transport="hosts",
        local_world_size=2,
        optimizer=None,
        keep_gathered=False,
        wire=wire,
    )
    with hosts_of(2, 2) as group:
        model = case_of(group, "net", keep_gathered=False, wire=wire)
        predicted = model.memory("predicted")
        for step in range(2):
            loss_of(model(case.batch(step, dist.get_rank()))).backward()
        peak = model.memory("peak")
    same = all(told[part] == predicted[part] for part in ("slots", "buckets", "transport"))
    return same, peak["transport"] - predicted["transport"], told["transport"]


@pytest.mark.thorough
def test_memory_is_as_predicted(pool4):
    exact, coded = (pool4.run(peaks, Wire(parameters=wire)) for wire in (None, "bf16"))
    for found in (exact, coded):
        assert all(same for same, _, _ in found), found
        assert all(more <= 0 for _, more, _ in found), found
    assert coded[0][2] >= exact[0][2]  # codes may fit into the memory of rounds


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("int8",), (None, "fp8"), (torch.bfloat16,)])
def test_unknown_names(arguments):
    with pytest.raises(ValueError, match=r"Wire: \w+ must be one of 'bf16', None"):
        Wire(*arguments)


def test_accepted_values():
    with pytest.raises(ValueError, match=r"'bf16', None, got 8"):
        zshard.predict_memory(Products(), 4, wire=8)
    both = zshard.predict_memory(Products(), 4, local_world_size=2, wire="bf16")
    assert both == zshard.predict_memory(
        Products(), 4, local_world_size=2, wire=Wire("bf16", "bf16")
    )
