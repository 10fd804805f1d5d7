"""Misuse of model.join(), and exceptions inside: a typed error on all ranks, and no deadlock.

Whatever one rank does, the others learn of it in their next exchange, including those whose data
has ended.
"""

from __future__ import annotations

import contextlib
import os
import re

import pytest
import torch
import torch.distributed as dist
from groups import own_group, passing_groups
from models import loss_of
from nursery import fork_ranks
from scenarios import message_of
from test_join import FEW, adamw, batch, built
from torch import nn

import zshard
from zshard import FSDP


def train(model, optimizer, n, at=None, error=None):
    """At step `at`, do something other than training."""
    for step in range(n):
        if step == at:
            error(model, optimizer)
        optimizer.zero_grad()
        loss_of(model(batch(step))).backward()
        optimizer.step()


def raises(model, optimizer):
    raise ValueError("boom")


def interrupts(model, optimizer):
    raise KeyboardInterrupt


class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("boom")


def raises_in_backward(model, optimizer):
    optimizer.zero_grad()
    hidden = model.blocks[0].register_forward_hook(lambda m, a, out: Bad.apply(out))
    try:
        loss_of(model(batch(0))).backward()
    finally:
        hidden.remove()


def raises_in_forward(model, optimizer):
    def fail(*args):
        raise ValueError("boom")

    hook = model.blocks[1].register_forward_pre_hook(fail)
    try:
        model(batch(0))
    finally:
        hook.remove()


@passing_groups()
def failing(combination, what, counts, raising, at):
    """Return what ranks raise if rank `raising` fails at a step."""
    rank = dist.get_rank()
    model = built(combination)
    optimizer = adamw(model.parameters())
    try:
        with model.join(optimizer):
            train(model, optimizer, counts[rank], at if rank == raising else None, what)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("raising", "at"), [(0, 1), (0, 3), (2, 0)])
@pytest.mark.parametrize("combination", FEW, ids="-".join)
@pytest.mark.parametrize("what", [raises, raises_in_forward, raises_in_backward, interrupts])
def test_exception_ends_join_on_all_ranks(pool3, combination, what, raising, at):
    own = "KeyboardInterrupt" if what is interrupts else "ValueError: boom"
    found = pool3.run(failing, combination, what, (5, 2, 4), raising, at)
    for rank, said in enumerate(found):
        if rank == raising:
            assert own in said, found
        else:
            assert said.startswith("DivergenceError") and f"rank {raising} " in said, found


@passing_groups()
def terminating(combination, counts):
    model = built(combination)
    optimizer = adamw(model.parameters())

    def run():
        with model.join(optimizer, throw_on_early_termination=True):
            train(model, optimizer, counts[dist.get_rank()])

    first = message_of(run, RuntimeError)
    with model.join(optimizer, throw_on_early_termination=True):
        train(model, optimizer, 2)
    return first


@pytest.mark.parametrize("combination", FEW, ids="-".join)
def test_throw_on_early_termination(pool2, combination):
    for said in pool2.run(terminating, combination, (3, 1)):
        assert "rank 1 has no more data" in said


@passing_groups()
def misused(combination):
    rank = dist.get_rank()
    model = built(combination)
    other = built(combination, process_group=own_group())
    optimizer, stranger = adamw(model.parameters()), adamw(other.parameters())
    plain = nn.Linear(2, 2)
    said = [
        message_of(lambda: model.join(stranger).__enter__(), ValueError),
        message_of(lambda: model.join(optimizer, optimizer).__enter__(), ValueError),
        message_of(lambda: model.join(plain).__enter__(), TypeError),
        message_of(lambda: model.join(3).__enter__(), TypeError),
        message_of(lambda: FSDP.join(plain, optimizer).__enter__(), TypeError),
        message_of(lambda: model.blocks[0].up.join().__enter__(), ValueError),
        message_of(
            lambda: model.join(optimizer, divide_by_initial_world_size=rank == 0).__enter__(),
            zshard.DivergenceError,
        ),
        message_of(lambda: model.join(*[optimizer][rank:]).__enter__(), zshard.DivergenceError),
        message_of(lambda: model.join(*[3][rank:]).__enter__(), TypeError),
    ]

    def nested():
        with model.join(optimizer), model.join(optimizer):
            pass

    def without():
        with model.join():
            train(model, optimizer, 1)

    def scaled():
        scaler = zshard.GradScaler()
        with model.join(optimizer):
            scaler.scale(loss_of(model(batch(0)))).backward()
            scaler.step(optimizer)

    said += [message_of(each, RuntimeError) for each in (nested, without, scaled)]
    with model.join(optimizer, enable=False):
        train(model, optimizer, 2)
    with model.join(optimizer):
        train(model, optimizer, 2 - rank)
    return said


@pytest.mark.parametrize("combination", FEW, ids="-".join)
def test_misuse_names_the_remedy(pool2, combination):
    expected = [
        "without a parameter of this model",
        "the same AdamW twice",
        "got Linear",
        "got int",
        "got Linear: call FSDP()",
        "not the model",
        "divide_by_initial_world_size is True on rank 0, but False on rank 1",
        "the list of optimizers is AdamW on rank 0, but none on rank 1",
        "got int",
        "join() is already active",
        "pass it, as in model.join(optimizer)",
        "call join(optimizer, scaler)",
    ]
    for found in pool2.run(misused, combination):
        for said, words in zip(found, expected, strict=True):
            assert words in said


@passing_groups()
def only_one_rank(combination):
    model = built(combination)
    optimizer = adamw(model.parameters())

    def run():
        with model.join(optimizer) if dist.get_rank() == 0 else contextlib.nullcontext():
            train(model, optimizer, 2)

    return message_of(run, (zshard.DivergenceError, zshard.PeerTimeoutError, zshard.PeerError))


@pytest.mark.parametrize(
    "combination", [("full_shard", "shm"), ("full_shard", "c10d")], ids="-".join
)
def test_join_on_one_rank_only(pool2, combination):
    for said in pool2.run(only_one_rank, combination):
        assert "rank" in said


@passing_groups()
def collectives(combination):
    """Calls that need all ranks are refused on those that have data; then these continue."""
    rank = dist.get_rank()
    model = built(combination)
    optimizer = adamw(model.parameters())
    said = []
    with model.join(optimizer):
        for step in range(3 if rank == 0 else 1):
            train(model, optimizer, 1)
            if step == 1:
                said.append(message_of(lambda: zshard.named_norms(model, grads=True), RuntimeError))
                said.append(message_of(lambda: optimizer.state_dict(), RuntimeError))
    model.state_dict()
    return said


@pytest.mark.parametrize("combination", [("full_shard", "c10d")], ids="-".join)
def test_collectives_without_all_ranks_are_refused(pool2, combination):
    first, second = pool2.run(collectives, combination)
    for said in first:
        assert "after join()" in said
    assert second == []


@passing_groups()
def writing_by_hand(combination):
    """Writes that ranks without data cannot notice are an error, not a different model."""
    rank = dist.get_rank()
    model = built(combination)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def run():
        with model.join(optimizer):
            for step in range(4 if rank == 0 else 1):
                optimizer.zero_grad()
                loss_of(model(batch(step))).backward()
                optimizer.step()
                with torch.no_grad():
                    next(model.parameters()).mul_(0.9)

    return message_of(run, zshard.DivergenceError)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_direct_writes_without_all_ranks_are_refused(pool2, transport):
    for said in pool2.run(writing_by_hand, ("full_shard", transport)):
        assert "mul_()" in said or "rank" in said


@passing_groups()
def catching(combination):
    """Rank 0 fails in a backward, and all ranks with data skip the step; ranks without do not
    notice."""
    rank = dist.get_rank()
    model = built(combination)
    optimizer = adamw(model.parameters())
    said = []
    with model.join(optimizer):
        for step in range((5, 1, 4)[rank]):
            try:
                train(
                    model, optimizer, 1, 0 if (rank, step) == (0, 2) else None, raises_in_backward
                )
            except (ValueError, zshard.DivergenceError) as error:
                said.append(type(error).__name__)
                optimizer.zero_grad()
    model.state_dict()
    return said


@pytest.mark.parametrize("combination", FEW, ids="-".join)
def test_caught_exception_skips_one_step(pool3, combination):
    assert pool3.run(catching, combination) == [["ValueError"], [], ["DivergenceError"]]


@passing_groups()
def two_models(combination):
    group = own_group()
    one, two = (built(combination, process_group=group) for _ in range(2))
    first, second = adamw(one.parameters()), adamw(two.parameters())

    def both():
        with one.join(first):
            train(one, first, 1)
            train(two, second, 1)

    def within():
        with one.join(first), two.join(second):
            pass

    return message_of(both, RuntimeError), message_of(within, RuntimeError)


@pytest.mark.parametrize("combination", FEW, ids="-".join)
def test_other_models_of_the_same_ranks_are_refused(pool2, combination):
    for both, within in pool2.run(two_models, combination):
        assert "another model" in both and "already active" in within


def hook_steps(model, optimizer):
    last = list(model.parameters())[-1]
    last.register_post_accumulate_grad_hook(lambda param: optimizer.step())


@passing_groups()
def refused(combination):
    model = built(combination)
    optimizer = zshard.AdamW(model.parameters())
    handle = model.optimizer_in_backward(optimizer)
    said = [message_of(lambda: model.join(optimizer).__enter__(), NotImplementedError)]
    handle.remove()
    hook_steps(model, optimizer)

    def run():
        with model.join(optimizer):
            train(model, optimizer, 1)

    return [*said, message_of(run, RuntimeError)]


@pytest.mark.parametrize("combination", FEW, ids="-".join)
def test_steps_within_backward_are_refused(pool2, combination):
    for first, second in pool2.run(refused, combination):
        assert "optimizer_in_backward()" in first and "within a backward" in second


def leave_early(transport):
    dist.init_process_group("gloo")
    model = built(("full_shard", transport), process_group=dist.group.WORLD)
    optimizer = adamw(model.parameters())
    try:
        with model.join(optimizer):
            for step in range((4, 1, 4)[dist.get_rank()]):
                train(model, optimizer, 1)
                if (dist.get_rank(), step) == (2, 2):
                    os._exit(0)
    except zshard.PeerError as error:
        print(error, flush=True)
        os._exit(0)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_dead_rank(transport):
    """Over c10d, the second rank to notice may only see that the first has exited."""
    first, second, _ = fork_ranks(leave_early, 3, transport, check=False)
    told = [first.stdout, second.stdout]
    for each in told:
        assert re.search(r"rank \d.* (exited|died)", each)
    assert any("rank 2" in each for each in told) and (transport == "c10d" or "rank 2" in told[0])
