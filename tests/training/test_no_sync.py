"""no_sync() and set_requires_gradient_sync(): gradients that stay on their rank for a while."""

from __future__ import annotations

import contextlib
import mmap

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import CASES, COMBINATIONS, Block, ddp, differences, loss_of, make, wrapped
from scenarios import WIDTH, Stack, all_grads, check_mean_grads, floats, message_of
from spawn import on_ranks, ranks
from torch import nn

import zshard


def unsynced(model):
    """no_sync() of a model that has it; a plain model sums its gradients up anyway."""
    return getattr(model, "no_sync", contextlib.nullcontext)()


def step(model, rank, number):
    loss_of(model(floats(rank, number))).backward()


# --- the gradients ---------------------------------------------------------------------------------


def sum_up(model, rank):
    with unsynced(model):
        step(model, rank, 0)
        step(model, rank, 1)
    step(model, rank, 2)


def sum_up_twice(model, rank):
    sum_up(model, rank)
    model.zero_grad()
    sum_up(model, rank)


def on_top_of_reduced_ones(model, rank):
    step(model, rank, 0)
    with unsynced(model):
        step(model, rank, 1)
    step(model, rank, 2)


def zero_grad_between(model, rank):
    for number, set_to_none in enumerate((True, False)):
        with unsynced(model):
            step(model, rank, number)
        model.zero_grad(set_to_none=set_to_none)
        with unsynced(model):
            step(model, rank, 2 + number)
        step(model, rank, 4 + number)


def scale_between(model, rank):
    with unsynced(model):
        step(model, rank, 0)
    for param in model.parameters():
        param.grad.mul_(0.5)
    step(model, rank, 1)


def drop_some_between(model, rank):
    with unsynced(model):
        step(model, rank, 0)
    for name, param in model.named_parameters():
        if "up" in name:
            param.grad = None
    step(model, rank, 1)


def blocks_alone(model, rank):
    blocks = list(model.blocks)
    with contextlib.ExitStack() as stack:
        for block in blocks[1:]:
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
    with unsynced(model):
        step(model, rank, 0)
    model.head.weight.requires_grad_(False)
    step(model, rank, 1)
    model.head.weight.requires_grad_(True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("run", "exact"),
    [
        (sum_up, True),
        (sum_up_twice, True),
        (on_top_of_reduced_ones, False),
        (zero_grad_between, False),
        (scale_between, True),
        (drop_some_between, True),
        (blocks_alone, False),
        (by_the_switch, True),
        (evaluate_between, True),
        (frozen_between, True),
    ],
)
def test_accumulated_gradients_are_the_mean_of_the_sums(pool2, run, exact):
    pool2.run(check_mean_grads, Stack, run, exact)


@ranks(3, 4)
def test_gradients_on_more_ranks(pool):
    pool.run(check_mean_grads, Stack, sum_up_twice, False)


class Optional(nn.Module):
    """Its block is used when asked for."""

    def __init__(self):
        super().__init__()
        self.block = Block(WIDTH)
        self.other = Block(WIDTH)
        self.head = nn.Linear(WIDTH, 2)
        self.used = True

    def forward(self, x):
        x = self.block(x) if self.used else x
        return self.head(self.other(x))


def used_only_before(model, rank):
    with unsynced(model):
        step(model, rank, 0)
    model.used = False
    step(model, rank, 1)
    model.used = True


def used_on_one_rank_only_before(model, rank):
    model.used = rank == 0
    with unsynced(model):
        step(model, rank, 0)
    model.used = False
    step(model, rank, 1)


@pytest.mark.parametrize("run", [used_only_before, used_on_one_rank_only_before])
def test_parameters_unused_in_the_last_backward_are_reduced(pool2, run):
    pool2.run(check_mean_grads, Optional, run, True, ONE_ORDER[run])


# Over c10d under full_shard all ranks have to run the same forwards.
ONE_ORDER = {
    used_only_before: COMBINATIONS,
    used_on_one_rank_only_before: [c for c in COMBINATIONS if c[1] == "shm" or c[0] == "no_shard"],
}


def trained_with_micro_batches(model, parallel, rank, case):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for number in range(9):
        waits = number % 3 < 2
        with parallel.no_sync() if waits else contextlib.nullcontext():
            loss_of(parallel(case.batch(number, rank))).backward()
        if not waits:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("name", ["mlp", "net", "odds"])
@on_ranks(2)
def test_training_is_bit_identical_to_ddp(name):
    case, rank = CASES[name], dist.get_rank()
    plain = make(case.make)
    parallel = ddp(plain, find_unused_parameters=case.unused)
    expected = trained_with_micro_batches(plain, parallel, rank, case)
    found = {}
    for combination in COMBINATIONS:
        model = wrapped(case.make, combination)
        found[combination] = differences(
            trained_with_micro_batches(model, model, rank, case), expected
        )
    assert not any(found.values()), found


# --- what lies in .grad ------------------------------------------------------------------------------


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_grad_is_local_and_unsharded(combination):
    """.grad is this rank's own, unsharded, in no_sync(), and a shard after the last backward."""
    rank = dist.get_rank()
    plain, model = make(Stack), wrapped(Stack, combination)
    for net in (plain, model):
        with unsynced(net):
            step(net, rank, 0)
            step(net, rank, 1)
    ours, own = ({n: p.grad for n, p in net.named_parameters()} for net in (model, plain))
    assert_same(ours, own, "the gradients")
    step(model, rank, 2)
    assert all(p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.parametrize("combination", [c for c in COMBINATIONS if c[0] != "no_shard"])
@on_ranks(2)
def test_clipping_and_steps_on_unreduced_gradients_are_refused(combination):
    model = wrapped(Stack, combination)
    with model.no_sync():
        step(model, dist.get_rank(), 0)
    optimizer = zshard.AdamW(model.parameters())
    messages = [
        message_of(lambda: model.clip_grad_norm_(1.0)),
        message_of(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
        message_of(optimizer.step),
        message_of(torch.optim.AdamW(model.parameters(), fused=True).step),
    ]
    for message in messages:
        assert "no_sync()" in message and "unit '" in message, messages


UNITS = 4


def units_of(model):
    return [module._zshard_state.unit for module in zshard.FSDP.fsdp_modules(model)]


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_memory_of_unsharded_gradients_is_freed(transport):
    combination = ("full_shard", transport)
    model = wrapped(Stack, combination)
    rank, held = dist.get_rank(), []
    step(model, rank, 0)
    for number in range(3):
        model.zero_grad()
        held.append(model.memory()["grads"])
        with model.no_sync():
            step(model, rank, 0)
            held.append(model.memory()["grads"])
        step(model, rank, number)
    whole = sum(unit.bytes["bucket"] for unit in units_of(model))
    before, during = held[:2]
    assert held == [before, during] * 3
    assert whole <= during - before <= whole + UNITS * mmap.PAGESIZE


# --- trouble -------------------------------------------------------------------------------------


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_exception_leaves_the_accumulated_sum(combination):
    """An exception on all ranks in a backward in no_sync() leaves the earlier sum."""
    rank = dist.get_rank()
    model, fresh = wrapped(Stack, combination), wrapped(Stack, combination)
    with model.no_sync():
        step(model, rank, 0)
        with contextlib.suppress(ZeroDivisionError):
            out = model(floats(rank, 1))
            out.register_hook(lambda grad: 1 // 0)
            loss_of(out).backward()
    step(model, rank, 2)
    with fresh.no_sync():
        step(fresh, rank, 0)
    step(fresh, rank, 2)
    assert_same(all_grads(model), all_grads(fresh), "the gradients")


@on_ranks(2)
def test_set_requires_gradient_sync_is_restored():
    model = wrapped(Stack, ("full_shard", "shm"))
    names = {unit.name: unit for unit in units_of(model)}
    model.set_requires_gradient_sync(False, recurse=False)
    alone = {name for name, unit in names.items() if not unit.sync}
    with pytest.raises(KeyError), model.no_sync():
        everywhere = {name for name, unit in names.items() if not unit.sync}
        raise KeyError
    everywhere = everywhere == set(names)
    after = {n for n, unit in names.items() if not unit.sync}
    assert alone == {""} and everywhere and after == {""}


def test_world_size_one():
    plain, model = make(Stack), zshard.FSDP(make(Stack))
    for net in (plain, model):
        sum_up(net, 0)
    ours, theirs = ([p.grad for p in net.parameters()] for net in (model, plain))
    assert differences(ours, theirs) == []
