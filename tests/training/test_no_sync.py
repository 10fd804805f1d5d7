"""no_sync() and set_requires_gradient_sync(): gradients that stay on their rank for a while."""

from __future__ import annotations

import contextlib
import mmap

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import COMBINATIONS, Block, Parts, loss_of, make, wrapped
from rows import all_refused
from scenario import Scenario
from scenarios import WIDTH, Stack, check_mean_grads, floats, units_of
from spawn import on_ranks
from torch import nn

import zshard


def unsynced(model):
    """no_sync() of a model that has it; a plain model sums its gradients up anyway."""
    return getattr(model, "no_sync", contextlib.nullcontext)()


def step(model, rank, number):
    loss_of(model(floats(rank, number))).backward()


def step_unsynced(model, rank, number):
    with unsynced(model):
        step(model, rank, number)


# --- the gradients --------------------------------------------------------------------------------


def sum_up_twice(model, rank):
    for _ in range(2):
        model.zero_grad()
        with unsynced(model):
            step(model, rank, 0)
            step(model, rank, 1)
        step(model, rank, 2)


def on_top_of_reduced_ones(model, rank):
    step(model, rank, 0)
    step_unsynced(model, rank, 1)
    step(model, rank, 2)


def zero_grad_between(model, rank):
    for number, set_to_none in enumerate((True, False)):
        step_unsynced(model, rank, number)
        model.zero_grad(set_to_none=set_to_none)
        step_unsynced(model, rank, 2 + number)
        step(model, rank, 4 + number)


def scale_or_drop_between(model, rank):
    step_unsynced(model, rank, 0)
    for name, param in model.named_parameters():
        param.grad.mul_(0.5)
        if "up" in name:
            param.grad = None
    step(model, rank, 1)


def blocks_alone(model, rank):
    with contextlib.ExitStack() as stack:
        for block in list(model.blocks)[1:]:
            stack.enter_context(unsynced(block))
        step(model, rank, 0)
    step(model, rank, 1)


def by_the_switch(model, rank):
    switch = getattr(model, "set_requires_gradient_sync", lambda on: None)
    switch(False)
    step(model, rank, 0)
    switch(True)
    step(model, rank, 1)


def evaluate_between(model, rank):
    with unsynced(model):
        step(model, rank, 0)
        with torch.no_grad():
            model(floats(rank, 5))
    step(model, rank, 1)


def frozen_between(model, rank):
    step_unsynced(model, rank, 0)
    model.head.weight.requires_grad_(False)
    step(model, rank, 1)
    model.head.weight.requires_grad_(True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("run", "exact"),
    [
        (sum_up_twice, True),
        (on_top_of_reduced_ones, False),
        (zero_grad_between, False),
        (scale_or_drop_between, True),
        (blocks_alone, False),
        (by_the_switch, True),
        (evaluate_between, True),
        (frozen_between, True),
    ],
)
@on_ranks(2, 3, 4)
def test_accumulated_gradients_are_the_mean_of_the_sums(run, exact):
    check_mean_grads(Stack, run, exact and dist.get_world_size() == 2)


def optional():
    """Its first block is used when asked for."""
    blocks = {"first": Block(WIDTH), "last": Block(WIDTH)}
    run = lambda model, x: model.last(model.first(x) if model.used else x)  # noqa: E731
    return Parts(run, used=True, **blocks)


def used_only_before(model, rank):
    step_unsynced(model, rank, 0)
    model.used = False
    step(model, rank, 1)


def used_on_one_rank_only_before(model, rank):
    model.used = rank == 0
    used_only_before(model, rank)


# Over c10d under full_shard all ranks have to run the same forwards.
IN_ANY_ORDER = [c for c in COMBINATIONS if c[1] == "shm" or c[0] == "no_shard"]


@pytest.mark.parametrize(
    ("run", "combinations"),
    [(used_only_before, COMBINATIONS), (used_on_one_rank_only_before, IN_ANY_ORDER)],
)
@on_ranks(2)
def test_parameters_unused_in_the_last_backward_are_reduced(run, combinations):
    check_mean_grads(optional, run, True, combinations)


@pytest.mark.parametrize("name", ["mlp", "net", "odds"])
@on_ranks(2)
def test_training_is_bit_identical_to_ddp(name):
    Scenario(name, optimizer="torch.SGD", micro_batches=3).same_under(COMBINATIONS)


def test_world_size_one():
    alone = Scenario("net", ("full_shard", None), micro_batches=3)
    assert_same(alone.sharded(None).state(), alone.plain(None).state(), "one rank's training")


# --- what lies in .grad ---------------------------------------------------------------------------


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_grad_is_local_and_unsharded(combination):
    """.grad is this rank's own, unsharded, in no_sync(), and a shard after the last backward."""
    rank = dist.get_rank()
    plain, model = make(Stack), wrapped(Stack, combination)
    for each in (plain, model):
        step_unsynced(each, rank, 0)
        step_unsynced(each, rank, 1)
    ours, own = ({n: p.grad for n, p in each.named_parameters()} for each in (model, plain))
    assert_same(ours, own, "the gradients")
    step(model, rank, 2)
    assert all(p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.parametrize("combination", [c for c in COMBINATIONS if c[0] != "no_shard"])
@on_ranks(2)
def test_clipping_and_steps_on_unreduced_gradients_are_refused(combination):
    model = wrapped(Stack, combination)
    step_unsynced(model, dist.get_rank(), 0)
    calls = {
        "method": lambda: model.clip_grad_norm_(1.0),
        "function": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "zshard's step": zshard.AdamW(model.parameters()).step,
        "torch's step": torch.optim.AdamW(model.parameters(), fused=True).step,
    }
    for text in ("no_sync()", "unit '"):
        all_refused({name: (call, Exception, text) for name, call in calls.items()})


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_memory_of_unsharded_gradients_is_freed(transport):
    model = wrapped(Stack, ("full_shard", transport))
    rank, held = dist.get_rank(), []
    step(model, rank, 0)
    for number in range(3):
        model.zero_grad()
        held.append(model.memory()["grads"])
        with model.no_sync():
            step(model, rank, 0)
            held.append(model.memory()["grads"])
        step(model, rank, number)
    units = units_of(model)
    whole = sum(unit.bytes["bucket"] for unit in units)
    before, during = held[:2]
    assert held == [before, during] * 3
    assert whole <= during - before <= whole + len(units) * mmap.PAGESIZE


@on_ranks(2)
def test_set_requires_gradient_sync_is_restored():
    model = wrapped(Stack, ("full_shard", "shm"))

    def unsynced_units():
        return [unit.name for unit in units_of(model) if not unit.sync]

    model.set_requires_gradient_sync(False, recurse=False)
    assert unsynced_units() == [""]
    with pytest.raises(KeyError), model.no_sync():
        assert len(unsynced_units()) == len(units_of(model))
        raise KeyError
    assert unsynced_units() == [""]
