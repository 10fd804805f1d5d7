"""transport="hosts": the same results as c10d over the same hosts, whatever ranks do.

ZSHARD_HOST simulates hosts on one machine. c10d sums in the same order on the same hosts, so both
transports must be bit-identical after every kind of step.
"""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from groups import hosts_of
from models import CASES, loss_of, make, make_optimizer
from scenarios import message_of
from spawn import on_ranks, ranks

import zshard
from zshard import FSDP
from zshard.ranks.meeting import ranks_per_host

BOTH = ("hosts", "c10d")
STRATEGIES = ("full_shard", "no_shard", "zero1")
STEPS = 3


def wrap(case, group, transport, strategy="full_shard", **options):
    return FSDP(
        make(case.make),
        strategy=strategy,
        transport=transport,
        process_group=group,
        auto_wrap_policy=case.policy,
        timeout=60,
        **options,
    )


def numbers_of(model):
    """Return all parameters and buffers as one tensor; collective."""
    return torch.cat([value.detach().double().flatten() for value in model.state_dict().values()])


def train(model, case, steps=STEPS, alone=None):
    """Return losses of steps with accumulation and clipping; `alone(model, step)` runs before
    each."""
    optimizer, losses, rank = make_optimizer("torch.AdamW", model), [], dist.get_rank()
    for step in range(steps):
        if alone is not None:
            alone(model, step)
        with model.no_sync() if step == 1 else contextlib.nullcontext():
            loss_of(model(case.batch(step, rank))).backward()
        loss = loss_of(model(case.batch(step, rank + 4)))
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(name, strategy, low, sizes):
    case = CASES[name]
    options = {"mixed_precision": zshard.MixedPrecision(torch.bfloat16)} if low else {}
    found = []
    with hosts_of(*sizes) as group:
        for transport in BOTH:
            model = wrap(case, group, transport, strategy, **options)
            losses = train(model, case)
            found.append((losses, numbers_of(model)))
            assert f"transport {transport}" in model.summary()
    return found[0][0] == found[1][0], torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bit_identical_to_c10d(pool4, strategy, low):
    assert pool4.run(trained, "mlp", strategy, low, (2, 2)) == [(True, True)] * 4


@pytest.mark.parametrize("name", ["net", "tied", "unused", "frozen"])
def test_models_of_all_kinds(pool4, name):
    assert pool4.run(trained, name, "full_shard", False, (2, 2)) == [(True, True)] * 4


def test_replicated_copies_are_private_to_each_rank(pool4):
    """Each rank casts at any time: memory that a host's ranks share would hold another unit's."""
    assert pool4.run(trained, "net", "no_shard", True, (2, 2)) == [(True, True)] * 4


def test_one_rank_per_host(pool2):
    assert pool2.run(trained, "mlp", "full_shard", False, (1, 1)) == [(True, True)] * 2


def test_several_hosts_with_one_rank_each(pool4):
    """Each rank sends its turns to three hosts."""
    assert pool4.run(trained, "mlp", "full_shard", False, (1, 1, 1, 1)) == [(True, True)] * 4


@ranks(6)
def test_several_hosts_with_several_ranks(pool):
    """The first ranks of hosts carry the turns between some of these, the second ranks between
    others."""
    assert pool.run(trained, "mlp", "full_shard", False, (2, 2, 2)) == [(True, True)] * 6


def evaluate_alone(model, step):
    """One rank evaluates while the others continue to train."""
    if dist.get_rank() == step:
        with torch.no_grad():
            model(CASES["mlp"].batch(9, 0))


def trained_beside_lone_evaluations():
    case, found = CASES["mlp"], []
    with hosts_of(2, 2) as group:
        for alone in (None, evaluate_alone):
            model = wrap(case, group, "hosts")
            losses = train(model, case, alone=alone)
            found.append((losses, numbers_of(model)))
    return found[0][0] == found[1][0], torch.equal(found[0][1], found[1][1])


def test_rank_evaluates_alone_while_others_train(pool4):
    """Ranks that have other units in the host's shared slots serve its gathers."""
    assert pool4.run(trained_beside_lone_evaluations) == [(True, True)] * 4


def caught():
    """Return how steps end if rank 3 abandons two of them: its backward raises during rounds."""
    found, rank = [], dist.get_rank()
    with hosts_of(2, 2) as group:
        for transport in BOTH:
            torch.manual_seed(0)
            layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
            options = {"transport": transport, "process_group": group, "timeout": 60}
            model = FSDP(layers, auto_wrap_policy={nn.Linear}, **options)
            optimizer, ends = make_optimizer("torch.SGD", model), []
            for step in range(5):

                def raises(gradient, fails=rank == 3 and step in (1, 3)):
                    if fails:
                        raise ValueError("planted")

                def watch(module, args, output, hook=raises):
                    output.register_hook(hook)

                handle = layers[3].register_forward_hook(watch)
                ends.append("")
                try:
                    model(torch.ones(2, 16) * (rank + step)).square().sum().backward()
                    optimizer.step()
                except (ValueError, zshard.DivergenceError) as error:
                    ends[-1] = type(error).__name__
                optimizer.zero_grad()
                handle.remove()
            found.append((ends, numbers_of(model)))
    return found[0][0], found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_failed_backward_on_one_rank_is_reported_once(pool4):
    """Rounds that were announced before the failure was known are over as well."""
    for rank, (ends, same) in enumerate(pool4.run(caught)):
        error = "ValueError" if rank == 3 else "DivergenceError"
        assert (ends, same) == (["", error, "", error, ""], True)


@on_ranks(4)
def test_lent_gradients_are_private_to_each_rank():
    case, found = CASES["net"], []
    with hosts_of(2, 2) as group:
        for transport in BOTH:
            model = wrap(case, group, transport)
            model.optimizer_in_backward(zshard.AdamW(model.parameters(), lr=0.1))
            for step in range(STEPS):
                loss_of(model(case.batch(step, dist.get_rank()))).backward()
            found.append(numbers_of(model))
    assert torch.equal(*found)


@on_ranks(4)
def test_writes_to_full_parameters_are_private_to_each_rank():
    """Each rank writes different values: does it read its own, once all have written?"""
    case, rank, kept = CASES["net"], dist.get_rank(), []
    with hosts_of(2, 2) as group:
        model = wrap(case, group, "hosts")
        with FSDP.summon_full_params(model), torch.no_grad():
            written = [
                (parameter, torch.arange(parameter.numel()).view_as(parameter) + 0.25 * rank)
                for parameter in model.parameters()
            ]
            for parameter, values in written:
                parameter.copy_(values)
            dist.barrier(group)
            kept += [torch.equal(parameter, values) for parameter, values in written]
    assert all(kept) and len(kept) > 0


@on_ranks(4)
def test_slots_of_a_host_are_counted_once():
    case, found = CASES["net"], []
    with hosts_of(2, 2) as group:
        model = wrap(case, group, "hosts")
        for step in range(2):
            loss_of(model(case.batch(step, dist.get_rank()))).backward()
            found.append(model.memory()["slots"])
        alone = wrap(case, group, "c10d").memory()["slots"]
    assert found[0] == found[1]
    assert found[0] <= alone / 2 + 4096 * 8


def transport_and_warnings(sizes):
    with hosts_of(*sizes) as group, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        head = wrap(CASES["mlp"], group, "auto").summary().splitlines()[0]
    return head, [str(each.message) for each in caught if "hosts" in str(each.message)]


def test_hosts_that_differ_use_c10d(pool4):
    for rank, (head, warned) in enumerate(pool4.run(transport_and_warnings, (3, 1))):
        assert "transport c10d" in head
        assert len(warned) == (rank == 0)
        assert all("same number of ranks" in each for each in warned)


def refusal(sizes):
    with hosts_of(*sizes) as group:
        return message_of(lambda: wrap(CASES["mlp"], group, "hosts"), RuntimeError)


@pytest.mark.parametrize(
    ("sizes", "reason"), [((4,), "all ranks are on one host"), ((1, 3), "same number of ranks")]
)
def test_explicit_hosts_transport_where_unavailable(pool4, sizes, reason):
    for text in pool4.run(refusal, sizes):
        assert reason in text
        assert "Pass 'auto'" in text


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [("aabb", 2), ("ab", 1), ("aaaa", 0), ("aab", 0), ("abab", 0), ("aabbaa", 0), ("a", 0)],
)
def test_ranks_per_host(hosts, expected):
    assert ranks_per_host(hosts) == expected
