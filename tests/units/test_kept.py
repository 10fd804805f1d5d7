"""zero1, hybrid_full, a number of ranks to reshard to: a copy of the parameters stays between
steps.

Whatever is kept, results are bit-identical to full_shard. The collectives of the ranks that have
the same secondary shard show how often it is refreshed.
"""

from __future__ import annotations

import copy

import groups
import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from groups import mesh_of, on_hosts, trained
from models import CASES, ddp, differences, make, train
from scenarios import Stack, all_grads, forward_backward, loss_of, message_of
from spawn import on_ranks, ranks
from torch import nn

import zshard
from zshard import FSDP, MixedPrecision, fully_shard

KEEPING = ("zero1", "hybrid_full")


def wrap(name, strategy, **options):
    return groups.wrap(name, strategy, **{"transport": "c10d", **options})


def groups_for(strategy, shape):
    return {"device_mesh": mesh_of(*shape)} if strategy == "hybrid_full" else {}


def compare(name, strategy, shape, precision=None):
    """Return what differs in bits from full_shard over shm."""
    options = {"mixed_precision": precision}
    losses, state = trained(wrap(name, "full_shard", transport="shm", **options), name)
    model = wrap(name, strategy, **groups_for(strategy, shape), **options)
    ours_losses, ours = trained(model, name)
    return differences(ours, state) + ([] if losses == ours_losses else ["losses"])


@pytest.mark.parametrize("name", list(CASES))
def test_zero1_is_bit_identical_to_full_shard(pool2, name):
    assert pool2.run(compare, name, "zero1", None) == [[], []]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", list(CASES))
def test_hybrid_full_is_bit_identical_to_full_shard(pool4, name):
    assert pool4.run(compare, name, "hybrid_full", (2, 2)) == [[]] * 4


@ranks(2, 3)
@pytest.mark.parametrize("strategy", KEEPING)
def test_meshes_of_one_row_or_column(pool, strategy):
    for shape in ((pool.world, 1), (1, pool.world)):
        assert pool.run(compare, "net", strategy, shape) == [[]] * pool.world, shape


@pytest.mark.parametrize("strategy", KEEPING)
def test_bfloat16(pool4, strategy):
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert pool4.run(compare, "net", strategy, (2, 2), low) == [[]] * 4


@pytest.mark.parametrize("name", list(CASES))
@on_ranks(2)
def test_zero1_is_bit_identical_to_ddp(name):
    case, rank = CASES[name], dist.get_rank()
    plain = make(case.make, seed=1 + rank)
    parallel = ddp(plain, find_unused_parameters=case.unused)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    losses = train(parallel, case, optimizer, rank)
    ours_losses, ours = trained(wrap(name, "zero1"), name)
    assert ours_losses == losses
    assert differences(ours, plain.state_dict()) == []


# --- when the copy is refreshed -------------------------------------------------------------------


def step(model, optimizer, x):
    loss_of(model(x)).backward()
    optimizer.step()
    optimizer.zero_grad()


def renewals(strategy, shape):
    """Return how many gathers these take: a step, an accumulation's second backward, an evaluation,
    and a forward after a change that no counter of torch records; and the last one's result."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    options = {"transport": "c10d", "auto_wrap_policy": {nn.Linear}, **groups_for(strategy, shape)}
    model = FSDP(model, strategy=strategy, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.ones(2, 64)
    step(model, optimizer, x)
    counts = []

    def counted(act):
        with Collectives() as seen:
            result = act()
        counts.append(seen.gathers)
        return result

    counted(lambda: step(model, optimizer, x))
    model(x)
    counted(lambda: loss_of(model(x)).backward())
    counted(lambda: model(x))
    with torch.no_grad():
        before = model(x)
        for param in model.parameters():
            param.data.mul_(2)  # no version counter records this
        after = counted(lambda: model(x))
    return counts, torch.equal(before, after)


@pytest.mark.parametrize("strategy", KEEPING)
def test_copy_is_refreshed_once_per_change(pool4, strategy):
    # zero1 keeps everything; with hybrid_full forward gathers the 4 units within the group,
    # backward all but the last.
    forward, backward = (0, 0) if strategy == "zero1" else (4, 3)
    passes = forward + backward
    for counts, same in pool4.run(renewals, strategy, (2, 2)):
        assert counts == [4 + passes, passes, forward, 4 + forward] and not same


@on_ranks(2)
def test_frozen_parameters_are_gathered_once():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    model = FSDP(model, strategy="zero1", transport="c10d", auto_wrap_policy={nn.Linear})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step(model, optimizer, torch.ones(2, 64))
    with Collectives() as seen:
        step(model, optimizer, torch.ones(2, 64))
    assert seen.gathers == 1


@on_ranks(2)
def test_write_to_the_copy_is_an_error_and_undone():
    """A forward that writes to full parameters is an error; their values are then restored."""

    class Writer(nn.Linear):
        write = True

        def forward(self, x):
            if self.write:
                with torch.no_grad():
                    self.weight.mul_(dist.get_rank() + 2)
            return super().forward(x)

    torch.manual_seed(0)
    model = FSDP(nn.Sequential(Writer(8, 8)), strategy="zero1", transport="c10d")
    before = copy.deepcopy(model.state_dict())
    message = message_of(lambda: model(torch.ones(2, 8)), RuntimeError)
    model[0].write = False
    after = model(torch.ones(2, 8))
    wanted = nn.functional.linear(torch.ones(2, 8), before["0.weight"], before["0.bias"])
    assert "modified in place" in message
    assert differences(after, wanted) == []


# --- memory and groups ----------------------------------------------------------------------------


def held(strategy, shape, transport="c10d"):
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)])
    groups = groups_for(strategy, shape)
    model = FSDP(model, strategy=strategy, transport=transport, **groups)
    optimizer = zshard.AdamW(model.parameters())
    step(model, optimizer, torch.ones(2, 128))
    state = sum(s["exp_avg"].numel() * 4 for s in optimizer.state.values())
    return model.memory(), state, model.summary().splitlines()[0].split("; ")[-1]


@pytest.mark.parametrize("strategy", KEEPING)
def test_memory_is_the_state_shard_and_the_secondary_shard(pool4, strategy):
    whole = 4 * 4 * (128 * 128 + 128)
    for memory, state, head in pool4.run(held, strategy, (2, 2)):
        kept = whole if strategy == "zero1" else whole / 2
        assert kept <= memory["kept"] < 1.1 * kept
        assert memory["shards"] < 1.1 * whole / 4 and memory["grads"] < 1.1 * whole / 4
        assert state < 1.1 * whole / 4
        near = 1 if strategy == "zero1" else 2
        assert f"secondary shards over {near} rank(s)" in head


@pytest.mark.parametrize("strategy", KEEPING)
def test_over_shm_nothing_is_kept(pool4, strategy):
    for memory, _, head in pool4.run(held, strategy, (2, 2), "shm"):
        assert memory["kept"] == memory["slots"] == 0
        assert "kept" not in head


def kept_on_hosts(precision):
    """Shm reads the copy."""
    with on_hosts(2):
        options = {"transport": None, "mixed_precision": precision}
        model = wrap("net", "hybrid_full", device_mesh=mesh_of(2, 2), **options)
        head = model.summary().splitlines()[0]
        other = wrap("net", "full_shard", mixed_precision=precision)
        wrong = differences(trained(model, "net")[1], trained(other, "net")[1])
        return head, wrong, model.memory()["slots"]


@pytest.mark.parametrize("precision", [None, MixedPrecision(param_dtype=torch.bfloat16)])
def test_copy_within_a_host_is_read_over_shm(pool4, precision):
    for head, wrong, slots in pool4.run(kept_on_hosts, precision):
        assert wrong == []
        assert "transport hosts; secondary shards over 2 rank(s), transport shm" in head
        assert slots == 0 or precision is not None  # state_dict() gathers what is not kept


def by_number(number):
    """fully_shard(reshard_after_forward=number) of the layers alone: return what differs from
    True."""
    found = []
    for given in (True, number):
        model = make(Stack)
        for layer in model.blocks:
            fully_shard(layer, reshard_after_forward=given)
        fully_shard(model)
        forward_backward(model, dist.get_rank())
        found.append((all_grads(model), model.summary().splitlines()[0]))
    (expected, _), (ours, head) = found
    return differences(ours, expected), head


def test_reshard_to_a_number_of_ranks(pool4):
    for wrong, head in pool4.run(with_environment, by_number, 2):
        assert wrong == [] and "secondary shards over 2 rank(s)" in head
    for wrong, head in pool4.run(with_environment, by_number, 4):
        assert wrong == [] and "kept" not in head


def with_environment(function, *args):
    patch = pytest.MonkeyPatch()
    patch.setenv("ZSHARD_TRANSPORT", "c10d")
    try:
        return function(*args)
    finally:
        patch.undo()


def mistakes():
    def override(module):
        return {"strategy": "zero1"} if isinstance(module, nn.Linear) else False

    world = dist.group.WORLD
    crossed = [dist.new_group([0, 3]), dist.new_group([1, 2])][dist.get_rank() in (1, 2)]
    near = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    policy = zshard.wrap.CustomPolicy(override)
    return [
        message_of(lambda: fully_shard(make(Stack), reshard_after_forward=3), ValueError),
        message_of(lambda: FSDP(make(Stack), auto_wrap_policy=policy), ValueError),
        message_of(lambda: FSDP(make(Stack), world, "hybrid_full"), ValueError),
        message_of(
            lambda: FSDP(make(Stack), (near, crossed), "hybrid_full", transport="c10d"), ValueError
        ),
    ]


def test_mistakes_are_named(pool4):
    expected = ["does not divide the 4 ranks", "applies to entire models", "two groups", "mesh"]
    for messages in pool4.run(mistakes):
        for word, message in zip(expected, messages, strict=True):
            assert word in message


@on_ranks(2)
def test_copied_model_keeps_secondary_shards():
    model = wrap("net", "zero1")
    average = copy.deepcopy(model)
    trained(model, "net")
    before = average.state_dict()
    trained(average, "net")
    assert average.memory()["kept"] > 0
    assert differences(before, model.state_dict()) != []  # it was not trained with the model
    assert differences(average.state_dict(), model.state_dict()) == []
