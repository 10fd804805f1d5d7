"""zero1, hybrid_full, a number of ranks to reshard to: a copy of the parameters stays between
steps.

For every kept copy, results are bit-identical to full_shard. The collectives of the ranks that have
the same secondary shard show how often it is refreshed.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from compare import assert_same
from groups import mesh_of, on_hosts
from models import CASES, loss_of, make
from rows import all_refused
from scenario import Scenario, Training
from scenarios import Stack, all_grads, forward_backward, over
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, MixedPrecision, fully_shard

KEEPING = ("zero1", "hybrid_full")
BF16 = MixedPrecision(param_dtype=torch.bfloat16)


def mesh_for(strategy, shape):
    return {"device_mesh": mesh_of(*shape)} if strategy == "hybrid_full" else {}


def state_of(name, strategy, transport="c10d", steps=4, **options):
    seed = 1 + dist.get_rank()
    scenario = Scenario(name, (strategy, transport), "torch.SGD", options=options)
    return scenario.sharded(steps, seed).state()


def check_against_full_shard(name, strategy, shape, **options):
    """Bit-identical to full_shard over shm."""
    expected = state_of(name, "full_shard", "shm", **options)
    ours = state_of(name, strategy, **mesh_for(strategy, shape), **options)
    assert_same(ours, expected, f"{name} under {strategy} on a mesh of {shape}")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", list(CASES))
@on_ranks(4)
def test_hybrid_full_is_bit_identical_to_full_shard(name):
    check_against_full_shard(name, "hybrid_full", (2, 2))


@pytest.mark.parametrize("strategy", KEEPING)
@on_ranks(2, 3)
def test_meshes_of_one_row_or_column(strategy):
    world = dist.get_world_size()
    for shape in ((world, 1), (1, world)):
        check_against_full_shard("net", strategy, shape)


@pytest.mark.parametrize("strategy", KEEPING)
@on_ranks(4)
def test_bfloat16(strategy):
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    check_against_full_shard("net", strategy, (2, 2), mixed_precision=low)


# --- when the copy is refreshed -------------------------------------------------------------------


def step(model, optimizer):
    loss_of(model(torch.ones(2, model[0].in_features))).backward()
    optimizer.step()
    optimizer.zero_grad()


def layers_of(width, count=4):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(count)])


@pytest.mark.parametrize("strategy", KEEPING)
@on_ranks(4)
def test_copy_is_refreshed_once_per_change(strategy):
    """Counts the gathers of a step, an accumulation's second backward, an evaluation, and a forward
    after a change that no counter of torch records.

    zero1 keeps everything; with hybrid_full forward gathers the 4 units within the group, backward
    all but the last.
    """
    options = {"transport": "c10d", "auto_wrap_policy": {nn.Linear}, **mesh_for(strategy, (2, 2))}
    model = FSDP(layers_of(64), strategy=strategy, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, counts = torch.ones(2, 64), []
    step(model, optimizer)

    def counted(act):
        with Collectives() as seen:
            result = act()
        counts.append(seen.gathers)
        return result

    counted(lambda: step(model, optimizer))
    model(x)
    counted(lambda: loss_of(model(x)).backward())
    counted(lambda: model(x))
    with torch.no_grad():
        before = model(x)
        for param in model.parameters():
            param.data.mul_(2)  # no version counter records this
        after = counted(lambda: model(x))
    forward, backward = (0, 0) if strategy == "zero1" else (4, 3)
    passes = forward + backward
    assert counts == [4 + passes, passes, forward, 4 + forward]
    assert not torch.equal(before, after)


@on_ranks(2)
def test_frozen_parameters_are_gathered_once():
    model = layers_of(64, 2)
    model[0].requires_grad_(False)
    model = FSDP(model, strategy="zero1", transport="c10d", auto_wrap_policy={nn.Linear})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step(model, optimizer)
    with Collectives() as seen:
        step(model, optimizer)
    assert seen.gathers == 1


class Writer(nn.Linear):
    write = True

    def forward(self, x):
        if self.write:
            with torch.no_grad():
                self.weight.mul_(dist.get_rank() + 2)
        return super().forward(x)


@on_ranks(2)
def test_write_to_the_copy_is_an_error_and_undone():
    """A forward that writes to full parameters is an error; their values are then restored."""
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(Writer(8, 8)), strategy="zero1", transport="c10d")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="modified in place"):
        model(torch.ones(2, 8))
    model[0].write = False
    wanted = nn.functional.linear(torch.ones(2, 8), before["0.weight"], before["0.bias"])
    assert_same(model(torch.ones(2, 8)), wanted, "the output")


# --- memory and groups ----------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["c10d", "shm"])
@pytest.mark.parametrize("strategy", KEEPING)
@on_ranks(4)
def test_memory_is_the_state_shard_and_the_secondary_shard(strategy, transport):
    """Over shm nothing is kept."""
    options = mesh_for(strategy, (2, 2))
    model = FSDP(layers_of(128), strategy=strategy, transport=transport, **options)
    optimizer = zshard.AdamW(model.parameters())
    step(model, optimizer)
    memory, head = model.memory(), model.summary().splitlines()[0].split("; ")[-1]
    whole = 4 * 4 * (128 * 128 + 128)
    state = sum(s["exp_avg"].numel() * 4 for s in optimizer.state.values())
    if transport == "shm":
        assert memory["kept"] == memory["slots"] == 0 and "kept" not in head
        return
    assert max(memory["shards"], memory["grads"], state) < 1.1 * whole / 4
    near = 1 if strategy == "zero1" else 2
    assert whole / near <= memory["kept"] < 1.1 * whole / near
    assert f"secondary shards over {near} rank(s)" in head


@pytest.mark.parametrize("precision", [None, BF16])
@on_ranks(4)
def test_copy_within_a_host_is_read_over_shm(precision):
    with on_hosts(2):
        options = {"device_mesh": mesh_of(2, 2), "mixed_precision": precision}
        scenario = Scenario("net", ("hybrid_full", None), "torch.SGD", options=options)
        training = scenario.sharded(4, 1 + dist.get_rank())
        head = training.model.summary().splitlines()[0]
        assert "transport hosts; secondary shards over 2 rank(s), transport shm" in head
        other = state_of("net", "full_shard", mixed_precision=precision)
        assert_same(training.state(), other, "training")
        # state_dict() gathers the rest
        assert training.model.memory()["slots"] == 0 or precision is not None


@pytest.mark.parametrize(("number", "keeps"), [(2, True), (4, False)])
@on_ranks(4)
def test_reshard_to_a_number_of_ranks(number, keeps):
    """fully_shard(reshard_after_forward=number) of the layers alone has the gradients of True."""
    grads = []
    for reshard in (True, number):
        with over("c10d"):
            model = make(Stack)
            for layer in model.blocks:
                fully_shard(layer, reshard_after_forward=reshard)
            fully_shard(model)
        forward_backward(model, dist.get_rank())
        grads.append(all_grads(model))
    head = model.summary().splitlines()[0]
    assert_same(*grads, "the gradients")
    assert "secondary shards over 2 rank(s)" in head if keeps else "kept" not in head


@on_ranks(4)
def test_mistakes_are_named():
    def override(module):
        return {"strategy": "zero1"} if isinstance(module, nn.Linear) else False

    def sharded(*args, **options):
        return lambda: FSDP(make(Stack), *args, **options)

    crossed = [dist.new_group([0, 3]), dist.new_group([1, 2])][dist.get_rank() in (1, 2)]
    near = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    of_units = sharded(auto_wrap_policy=zshard.wrap.CustomPolicy(override))
    by_three = lambda: fully_shard(make(Stack), reshard_after_forward=3)  # noqa: E731
    no_mesh = sharded((near, crossed), "hybrid_full", transport="c10d")
    all_refused(
        {
            "a number": (by_three, ValueError, "does not divide the 4 ranks"),
            "some units": (of_units, ValueError, "applies to entire models"),
            "one group": (sharded(dist.group.WORLD, "hybrid_full"), ValueError, "two groups"),
            "no mesh": (no_mesh, ValueError, "mesh"),
        }
    )


@on_ranks(2)
def test_copied_model_keeps_secondary_shards():
    scenario = Scenario("net", ("zero1", "c10d"), "torch.SGD")
    model = scenario.wrapped()
    twin = copy.deepcopy(model)
    before = twin.state_dict()["head.weight"].clone()
    ours = Training(scenario, model, model, dist.get_rank()).go(4).state()
    assert_same(
        twin.state_dict()["head.weight"], before, "what the model's steps leave to the copy"
    )
    theirs = Training(scenario, twin, twin, dist.get_rank()).go(4).state()
    assert twin.memory()["kept"] > 0
    assert_same(theirs, ours, "the copy's training")
