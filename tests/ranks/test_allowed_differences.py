"""Ranks that do different things where they may: no error, and the same parameters on all ranks.

test_ranks_agree.py has the differences that are errors.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from models import loss_of, make
from scenarios import Wide, built, floats, learn, whole
from spawn import on_ranks
from test_ranks_agree import FEW, STEPS, adamw, check_equal
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from zshard import FSDP

# --- after each step ------------------------------------------------------------------------------


def last_digits_of_many_differ(optimizer, params):
    """A rate for each parameter, computed in float32 on one rank."""
    groups = optimizer.param_groups
    if len(groups) == 1:
        first = groups.pop()
        groups += [{**first, "params": [param]} for param in params]
    for i, group in enumerate(groups):
        group["lr"] = 1e-3 * 0.9**i
        if dist.get_rank() == 1:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32).item()


def rank_0_averages(optimizer, params):
    """A moving average that only rank 0 maintains: its copies are not parameters."""
    if not hasattr(optimizer, "average"):
        optimizer.average = [param.detach().clone() for param in params]
    for average, param in zip(optimizer.average, params, strict=True):
        if dist.get_rank() == 0:
            average.mul_(0.9).add_(param.detach(), alpha=0.1)


def set_by_rank(**values):
    """Return a function that gives a setting the first of two values on rank 0."""
    return lambda optimizer, params: optimizer.param_groups[0].update(
        {name: pair[dist.get_rank()] for name, pair in values.items()}
    )


RIGHT = {
    "last digits": set_by_rank(lr=(1e-3, 1e-3 * (1 + 3e-7))),
    "last digits of many": last_digits_of_many_differ,
    "averages": rank_0_averages,
    "writes where there is something": lambda optimizer, params: [
        param.mul_(0.999) for param in params if param.numel() > 0
    ],
    "implementation": set_by_rank(foreach=(True, False)),
    "what no optimizer reads": set_by_rank(where=("host 0", "host 1")),
}


@pytest.mark.parametrize("act", RIGHT)
@pytest.mark.parametrize("combination", FEW)
@on_ranks(2)
def test_allowed_differences_are_accepted(combination, act):
    model = built(combination)
    optimizer = adamw(model)
    for step in range(STEPS):
        learn(model, optimizer, step)
        with torch.no_grad():
            RIGHT[act](optimizer, list(model.parameters()))
    replicas_drift = act.startswith("last digits") and combination[0] == "no_shard"
    check_equal(whole(model), tolerance=1e-6 if replicas_drift else 0.0)


# --- in place of a step ---------------------------------------------------------------------------


def evaluate_alone_between(model, optimizer, step):
    """Rank 0 evaluates while the others continue with the next batch, whose gradients they zero in
    place."""
    model.zero_grad(set_to_none=False)
    loss_of(model(floats(dist.get_rank(), step))).backward()
    optimizer.step()
    if dist.get_rank() == 0 and step < STEPS - 1:
        with torch.no_grad():
            model(floats(0))


def load_and_broadcast(model, optimizer, step):
    """As under DDP, where every rank has the full model."""
    learn(model, optimizer, step)
    if dist.get_rank() == 0:
        model.load_state_dict(make(Wide, seed=step).state_dict())
    for param in model.parameters():
        dist.broadcast(param.data, 0)


def micro_batches(model, optimizer, step):
    """Under DDP ranks may run different numbers of backwards within no_sync(), which do not
    communicate."""
    optimizer.zero_grad()
    with model.no_sync():
        for i in range(1 + dist.get_rank()):
            loss_of(model(floats(i, step))).backward()
    loss_of(model(floats(dist.get_rank(), step))).backward()
    optimizer.step()


def zero_redundancy(model, optimizer, step):
    """torch's own, in which each rank steps its parameters: one big one against all others."""
    if step == 0:
        weights, biases = ([p for p in model.parameters() if p.dim() == d] for d in (2, 1))
        groups = [{"params": weights}, {"params": biases[:1], "lr": 1e-2}]
        group = model.process_group
        kind = torch.optim.AdamW
        model.redundant = ZeroRedundancyOptimizer(groups, kind, process_group=group, lr=1e-3)
    learn(model, model.redundant, step)


FULL_MODELS = [("no_shard", "shm"), ("no_shard", "c10d")]
SCRIPTS = {
    evaluate_alone_between: [(name, "shm") for name in ("full_shard", "shard_grad_op", "no_shard")],
    load_and_broadcast: FULL_MODELS,
    micro_batches: FULL_MODELS,
    zero_redundancy: FULL_MODELS,
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("script", "combination"), [(script, each) for script in SCRIPTS for each in SCRIPTS[script]]
)
@on_ranks(2)
def test_ranks_of_a_script_end_with_the_same_parameters(script, combination):
    model = built(combination)
    optimizer = adamw(model)
    for step in range(STEPS):
        script(model, optimizer, step)
    check_equal(whole(model))


# --- parameters of one rank -----------------------------------------------------------------------


class Extra(Wide):
    """With a parameter that the test does not shard."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("combination", FEW)
@on_ranks(2)
def test_optimizers_of_ignored_parameters_may_differ(combination):
    """Rank 0 alone steps it."""
    torch.manual_seed(0)
    body = Extra()
    strategy, transport = combination
    options = {"process_group": dist.new_group(), "ignored_states": [body.extra]}
    model = FSDP(body, strategy=strategy, transport=transport, **options)
    optimizer = adamw(nn.ParameterList(p for p in model.parameters() if p is not body.extra))
    own = torch.optim.SGD([body.extra], lr=0.1)
    for step in range(STEPS):
        learn(model, optimizer, step)
        body.extra.grad = torch.ones(3)
        if dist.get_rank() == 0:
            own.step()
    assert (body.extra.tolist() == [1.0, 1.0, 1.0]) == (dist.get_rank() == 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_each_rank_may_have_an_expert(transport):
    """Each rank steps its expert independently, with its own rate."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    rank = dist.get_rank()
    shared = built(("full_shard", transport))
    torch.manual_seed(rank)
    expert = FSDP(nn.Linear(64, 64), process_group=alone[rank])
    rates = ({"params": list(shared.parameters())}, {"params": list(expert.parameters())})
    rates[1]["lr"] = 0.1 * (rank + 1)
    optimizer = torch.optim.AdamW(rates, lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(expert(shared(floats(rank, step)))).backward()
        optimizer.step()
        if rank == 1:
            with torch.no_grad():
                next(expert.parameters()).mul_(0.9)
    check_equal(whole(shared))
