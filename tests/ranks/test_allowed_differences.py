"""Ranks that do different things where they may: no error, and the same parameters on all ranks.

test_ranks_agree.py has the differences that are errors.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import own_group, passing_groups
from models import loss_of, make
from scenarios import Wide, floats, learn, whole
from test_ranks_agree import FEW, STEPS, adamw, all_equal, built
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import zshard
from zshard import FSDP


@passing_groups()
def trained(combination, act):
    """Train with `act` after each step; return the final state."""
    model = built(combination)
    optimizer = adamw(model)
    for step in range(STEPS):
        learn(model, optimizer, step)
        act(model, optimizer)
    return whole(model)


def last_digits_differ(model, optimizer):
    optimizer.param_groups[0]["lr"] = 1e-3 * (1 + 3e-7 * dist.get_rank())


def last_digits_of_many_differ(model, optimizer):
    """A rate for each parameter, computed in float32 on one rank."""
    groups = optimizer.param_groups
    if len(groups) == 1:
        first, params = groups.pop(), list(model.parameters())
        groups += [{**first, "params": params[i : i + 1]} for i in range(len(params))]
    for i, group in enumerate(groups):
        group["lr"] = 1e-3 * 0.9**i
        if dist.get_rank() == 1:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32).item()


def rank_0_averages(model, optimizer):
    """A moving average that only rank 0 maintains: its copies are not parameters."""
    if not hasattr(optimizer, "average"):
        optimizer.average = [param.detach().clone() for param in model.parameters()]
    for average, param in zip(optimizer.average, model.parameters(), strict=True):
        if dist.get_rank() == 0:
            average.mul_(0.9).add_(param.detach(), alpha=0.1)


def writes_where_there_is_something(model, optimizer):
    with torch.no_grad():
        for param in model.parameters():
            if param.numel() > 0:
                param.mul_(0.999)


def implementation_differs(model, optimizer):
    optimizer.param_groups[0]["foreach"] = dist.get_rank() == 0


def one_more_option_on_rank_1(model, optimizer):
    """An entry that no optimizer reads."""
    optimizer.param_groups[0]["where"] = f"host {dist.get_rank()}"


RIGHT = [
    last_digits_differ,
    last_digits_of_many_differ,
    rank_0_averages,
    writes_where_there_is_something,
    implementation_differs,
    one_more_option_on_rank_1,
]


@pytest.mark.parametrize("act", RIGHT, ids=lambda f: f.__name__)
@pytest.mark.parametrize("combination", FEW)
def test_allowed_differences_are_accepted(pool2, combination, act):
    digits = (last_digits_differ, last_digits_of_many_differ)
    replicas_drift = act in digits and combination[0] == "no_shard"
    results = pool2.run(trained, combination, act)
    assert all_equal(results, tolerance=1e-6 if replicas_drift else 0.0)


@passing_groups()
def evaluate_alone_between(combination):
    """Rank 0 evaluates while the others continue with the next batch, whose gradients they zero in
    place."""
    model = built(combination)
    optimizer = adamw(model)
    for step in range(STEPS):
        model.zero_grad(set_to_none=False)
        loss_of(model(floats(dist.get_rank(), step))).backward()
        optimizer.step()
        if dist.get_rank() == 0 and step < STEPS - 1:
            with torch.no_grad():
                model(floats(0))
    return whole(model)


@passing_groups()
def load_and_broadcast(combination):
    """As under DDP, where every rank has the full model."""
    model = built(combination)
    optimizer = adamw(model)
    for step in range(STEPS):
        learn(model, optimizer, step)
        if dist.get_rank() == 0:
            model.load_state_dict(make(Wide, seed=step).state_dict())
        for param in model.parameters():
            dist.broadcast(param.data, 0)
    return whole(model)


@passing_groups()
def micro_batches(combination):
    """Under DDP ranks may run different numbers of backwards within no_sync(), which do not
    communicate."""
    model = built(combination)
    optimizer = adamw(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            for i in range(1 + dist.get_rank()):
                loss_of(model(floats(i, step))).backward()
        loss_of(model(floats(dist.get_rank(), step))).backward()
        optimizer.step()
    return whole(model)


@passing_groups()
def zero_redundancy(combination):
    """torch's own, in which each rank steps its parameters: one big one against all others."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    group = own_group()
    strategy, transport = combination
    model = FSDP(body, process_group=group, strategy=strategy, transport=transport, timeout=20)
    weights, biases = ([p for p in model.parameters() if p.dim() == d] for d in (2, 1))
    optimizer = ZeroRedundancyOptimizer(
        [{"params": weights}, {"params": biases[:1], "lr": 1e-2}],
        optimizer_class=torch.optim.AdamW,
        process_group=group,
        lr=1e-3,
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step + dist.get_rank()))
        model(x).square().mean().backward()
        optimizer.step()
    return whole(model)


@passing_groups()
def ignored_on_rank_0(combination):
    """An unsharded parameter has an optimizer of its own on rank 0 alone."""
    torch.manual_seed(0)
    body = make(Wide)
    body.extra = nn.Parameter(torch.ones(3))
    model = FSDP(
        body,
        process_group=own_group(),
        strategy=combination[0],
        transport=combination[1],
        ignored_states=[body.extra],
    )
    optimizer = torch.optim.AdamW(
        [param for param in model.parameters() if param is not body.extra], lr=1e-3
    )
    own = torch.optim.SGD([body.extra], lr=0.1)
    for step in range(STEPS):
        learn(model, optimizer, step)
        body.extra.grad = torch.ones(3)
        if dist.get_rank() == 0:
            own.step()
    return body.extra.detach().tolist()


@pytest.mark.parametrize("combination", FEW)
def test_optimizers_of_ignored_parameters_may_differ(pool2, combination):
    results = pool2.run(ignored_on_rank_0, combination)
    assert results[0] != results[1] == [1.0, 1.0, 1.0]


@passing_groups()
def experts(combination):
    """Each rank has an expert that it steps independently, with its own rate."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    rank = dist.get_rank()
    shared = built(combination)
    torch.manual_seed(rank)
    expert = FSDP(nn.Linear(64, 64), process_group=alone[rank])
    optimizer = torch.optim.AdamW(
        [
            {"params": list(shared.parameters())},
            {"params": list(expert.parameters()), "lr": 0.1 * (rank + 1)},
        ],
        lr=1e-3,
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(expert(shared(floats(rank, step)))).backward()
        optimizer.step()
        if rank == 1:
            with torch.no_grad():
                next(expert.parameters()).mul_(0.9)
    return whole(shared)


@passing_groups()
def scaled(combination):
    """A scaler that skips a step, since one rank's gradients are infinite."""
    model = built(combination)
    optimizer = adamw(model)
    scaler = zshard.GradScaler("cpu", init_scale=2.0**4)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(floats(dist.get_rank(), step)))
        if step == 1 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return whole(model)


@pytest.mark.parametrize("combination", FEW)
def test_scaler_may_skip(pool2, combination):
    results = pool2.run(scaled, combination)
    assert all_equal(results)
    assert [name for name, value in results[0].items() if not value.isfinite().all()] == []


FULL_MODELS = [("no_shard", "shm"), ("no_shard", "c10d")]
SCRIPTS = {
    evaluate_alone_between: [(name, "shm") for name in ("full_shard", "shard_grad_op", "no_shard")],
    load_and_broadcast: FULL_MODELS,
    micro_batches: FULL_MODELS,
    zero_redundancy: FULL_MODELS,
    experts: [("full_shard", "shm"), ("full_shard", "c10d")],
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("script", "combination"), [(script, each) for script in SCRIPTS for each in SCRIPTS[script]]
)
def test_ranks_of_a_script_end_with_the_same_parameters(pool2, script, combination):
    first, second = pool2.run(script, combination)
    assert_same(first, second, "the state of rank 0, compared with that of rank 1,")
