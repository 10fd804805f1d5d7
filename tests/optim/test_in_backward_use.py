"""optimizer_in_backward() in scripts: a world of one, schedulers, several optimizers, hooks.

Everything that a script does around a step() after backward also works around steps in backward.
"""

from __future__ import annotations

import copy
import functools
import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from models import COMBINATIONS, loss_of, make_optimizer, wrapped
from models import differences as differences_of
from recomputed import (
    ADAMW,
    Alone,
    alone,
    batch,
    step_after,
    three_steps,
    watch,
    wrong,
)
from scenarios import Stack as Blocks
from scenarios import floats
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP

# --- a world of one -------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [zshard.AdamW, zshard.Adam, zshard.SGD])
def test_single_rank(optimizer):
    states = []
    for in_backward in (False, True):
        model, made, _ = alone(in_backward, optimizer)
        counts = watch(model)
        for step in range(3):
            with model.no_sync():
                loss_of(model(batch(10 + step))).backward()
            loss_of(model(batch(step))).backward()
            step_after(model, made)
        states.append(model.state_dict())
        assert len(counts) == 150
    assert differences_of(*states) == []


def test_single_rank_in_mixed_precision():
    """Gradients are cast there, and so reduced even in a world of one."""
    states = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        policy = zshard.MixedPrecision(param_dtype=torch.bfloat16)
        model = FSDP(Alone(), auto_wrap_policy={nn.Linear}, mixed_precision=policy)
        made = zshard.AdamW(model.parameters(), 1e-2)
        if in_backward:
            model.optimizer_in_backward(made)
        for step in range(3):
            loss_of(model(batch(step))).backward()
            assert in_backward == all(p.grad is None for p in model.parameters())
            step_after(model, made)
        states.append(model.state_dict())
    assert differences_of(*states) == []


def test_single_rank_removed_handle_leaves_nothing():
    model, optimizer, handle = alone(True)
    loss_of(model(batch(0))).backward()
    copied = copy.deepcopy(model)
    handle.remove()
    handle.remove()
    for each in (model, copied):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in each.modules())
        loss_of(each(batch(1))).backward()
        assert [name for name, p in each.named_parameters() if p.grad is None] == []
    optimizer.step()
    expected, optimizer, _ = alone(False)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(expected(batch(step))).backward()
        optimizer.step()
    assert differences_of(model.state_dict(), expected.state_dict()) == []


# --- step(), schedulers, several optimizers, hooks ------------------------------------------------------


def scheduled(call_step, model, optimizer):
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    in_backward = model in zshard.optim.in_backward._handles
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            loss_of(model(floats(dist.get_rank(), step))).backward()
            if call_step or not in_backward:
                step_after(model, optimizer)
            schedule.step()


@pytest.mark.parametrize("call_step", [True, False])
def test_schedulers_advance_with_and_without_step_calls(pool2, call_step):
    run = functools.partial(scheduled, call_step)
    assert pool2.run(wrong, run, Blocks, [("full_shard", "shm")]) == [{}, {}]


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("split", [True, False])
@on_ranks(2)
def test_two_optimizers(combination, split):
    """Two optimizers over parameters of the same units: what differs from steps after backward.
    split: only one of them steps in backward."""
    states, kept = [], []
    for in_backward in (False, True):
        model = wrapped(Blocks, combination)
        params = list(model.parameters())
        a = zshard.AdamW(params[::2], 1e-2)
        b = zshard.SGD([{"params": params[1::4]}, {"params": params[3::4], "lr": 1e-3}], 0.1, 0.9)
        if in_backward:
            model.optimizer_in_backward(*([a] if split else [a, b]))
        for step in range(3):
            loss_of(model(floats(dist.get_rank(), step))).backward()
            kept.append([p.grad is not None for p in params])
            for optimizer in (a, b):
                step_after(model, optimizer)
        states.append(model.state_dict())
    found = differences_of(*states)
    assert found == []
    expected = [bool(i % 2) and split for i in range(len(kept[0]))]
    assert kept == [[True] * len(kept[0])] * 3 + [expected] * 3


@on_ranks(2)
@pytest.mark.parametrize("handles", [1, 2])
def test_a_backward_is_one_step_of_rounding_for_each_optimizer(handles):
    states, counts = [], []
    for in_backward in (False, True):
        torch.manual_seed(0)
        model = FSDP(nn.Sequential(FSDP(nn.Linear(64, 64)), FSDP(nn.Linear(64, 64))))
        optimizer = zshard.AdamW8bit(model.parameters(), lr=0.1, min_8bit_size=0)
        for part in () if not in_backward else [model] if handles == 1 else model:
            part.optimizer_in_backward(optimizer)
        for step in range(3):
            loss_of(model(batch(step))).backward()
            step_after(model, optimizer)
        states.append(model.state_dict())
        counts.append(optimizer.param_groups[0]["rounding_step"])
    assert differences_of(*states) == [] and counts == [3, 3]


def hooked(model, optimizer):
    """Users' hooks see the reduced gradient once, and the step uses their changes."""
    calls = []

    def clamp(param):
        calls.append(param)
        param.grad.clamp_(-1e-3, 1e-3)

    handles = [p.register_post_accumulate_grad_hook(clamp) for p in model.parameters()]
    three_steps(model, optimizer)
    assert len(calls) == 3 * len(handles)
    for handle in handles:
        handle.remove()


def test_users_hooks_run_before_the_step(pool2):
    assert pool2.run(wrong, hooked, Blocks) == [{}, {}]


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_removed_handle_leaves_the_model_unchanged(combination):
    """Return what differs after two steps in backward, remove() and two usual steps; memory as
    before."""
    states, memories = [], []
    for in_backward in (False, True):
        model = wrapped(Blocks, combination)
        optimizer = make_optimizer(ADAMW, model)
        handle = model.optimizer_in_backward(optimizer) if in_backward else None
        for step in range(4):
            if step == 2 and handle is not None:
                handle.remove()
            loss_of(model(floats(dist.get_rank(), step))).backward()
            shown = all(p.grad is not None for p in model.parameters())
            assert shown == (step >= 2 or not in_backward)
            memory = model.memory()
            held = memory["grads"] + memory["buckets"]  # where no_shard has them
            step_after(model, optimizer)
        states.append(model.state_dict())
        memories.append(held)
    found = differences_of(*states)
    (usual, after) = memories
    assert found == []
    assert usual == after > 0


def used_and_dropped(combination):
    model = wrapped(Blocks, combination)
    optimizer = zshard.AdamW(model.parameters())
    model.optimizer_in_backward(optimizer)
    loss_of(model(floats(dist.get_rank()))).backward()
    return [weakref.ref(thing) for thing in (model, optimizer, model.head.weight)]


def freed_at_once(combination):
    used_and_dropped(combination)  # torch's first optimizer leaves a cycle
    gc.collect()
    gc.disable()
    try:
        return [reference() is not None for reference in used_and_dropped(combination)]
    finally:
        gc.enable()


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_dropped_model_and_optimizer_are_freed_without_gc(pool2, combination):
    assert pool2.run(freed_at_once, combination) == [[False] * 3] * 2


def test_single_rank_dropped_model_is_freed_at_once():
    gc.collect()
    gc.disable()
    try:
        model, optimizer, _ = alone(True)
        loss_of(model(batch(0))).backward()
        references = [weakref.ref(thing) for thing in (model, optimizer, model.shift)]
        del model, optimizer, _
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()
