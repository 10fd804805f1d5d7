"""torch.autocast around several passes: each gather has its own casts.

Autocast keeps its casts of parameters until its context ends. The reference is a plain model that
drops them before each forward: bit-identical where each forward has its own backward. At any
time only one unit's casts are alive.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import hosts_of, mesh_of
from models import COMBINATIONS, Parts, loss_of, make, wrapped
from scenarios import Stack, floats, mean_grads, near, whole_grads
from scripts import (
    accumulate,
    evaluate_then_train,
    forward_without_backward,
    no_grad_forward_between,
    two_forwards_one_backward,
    two_forwards_two_backwards,
)
from spawn import on_ranks
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from zshard import FSDP


def on(enabled=True):
    return torch.autocast("cpu", torch.bfloat16, enabled)


# --- passes within one context --------------------------------------------------------------------


def inference_first(model, rank):
    model.eval()
    with torch.inference_mode():
        model(floats(rank, 7, rows=2))
    model.train()
    loss_of(model(floats(rank))).backward()


def backward_where_it_is_off(model, rank):
    for step in range(3):
        loss = loss_of(model(floats(rank, step)))
        with on(False):
            loss.backward()


def a_forward_raises(model, rank):
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model.head(floats(rank)[:, :3])
    loss_of(model(floats(rank))).backward()


SCENARIOS = [
    (evaluate_then_train, True),
    (inference_first, True),
    (no_grad_forward_between, True),
    (accumulate, False),
    (backward_where_it_is_off, False),
    (two_forwards_one_backward, True),
    (two_forwards_two_backwards, False),
    (forward_without_backward, False),
    (a_forward_raises, True),
]


def check(run, exact, model, strategy):
    """Gradients are the mean of those of plain models that drop their casts before each forward;
    where nothing is sharded, of models as plain as DDP's."""

    def in_one_context(model, rank):
        if not isinstance(model, FSDP) and strategy != "no_shard":
            model.register_forward_pre_hook(lambda *_: torch.clear_autocast_cache())
        with on():
            run(model, rank)

    expected = mean_grads(Stack, in_one_context)
    assert all(grad is not None and grad.abs().sum() > 0 for grad in expected.values())
    in_one_context(model, dist.get_rank())
    ours = whole_grads(model)
    if not exact:
        ours = {name: near(grad, expected[name]) for name, grad in ours.items()}
    assert_same(ours, expected, f"the gradients under {strategy}")


@pytest.mark.parametrize(("run", "exact"), SCENARIOS)
@on_ranks(2)
def test_passes_in_one_context(run, exact):
    for each in COMBINATIONS:
        check(run, exact, wrapped(Stack, each), each[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("run", "exact"), SCENARIOS)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@on_ranks(2)
def test_passes_in_one_context_on_two_hosts(run, exact, strategy):
    with hosts_of(1, 1) as group:
        model = wrapped(Stack, (strategy, "hosts"), process_group=group)
        assert "transport hosts" in model.summary()
        check(run, exact, model, strategy)


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_full"])
@pytest.mark.parametrize("run", [evaluate_then_train, accumulate])
@on_ranks(4)
def test_passes_in_one_context_under_hybrid_strategies(run, strategy):
    check(run, False, wrapped(Stack, (strategy, "c10d"), device_mesh=mesh_of(2, 2)), strategy)


# --- memory ---------------------------------------------------------------------------------------

SIDE = 24


class Living(TorchDispatchMode):
    """Counts casts of weights that are alive at each operation."""

    def __init__(self):
        super().__init__()
        self.casts = []
        self.made = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        cast = func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16
        if cast and result.shape == (SIDE, SIDE):
            self.casts.append(StorageWeakRef(result.untyped_storage()))
            self.made += 1
        self.most = max(self.most, self.alive())
        return result

    def alive(self):
        self.casts = [each for each in self.casts if not each.expired()]
        return len(self.casts)


def deep():
    def forward(model, x):
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False) if model.training else block(x)
        return x

    layers = (nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh()) for _ in range(8))
    return Parts(forward, blocks=nn.ModuleList(layers))


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "recomputed"])
@on_ranks(2)
def test_only_one_units_casts_are_alive(training, transport):
    model = FSDP(make(deep), auto_wrap_policy={nn.Sequential}, transport=transport).train(training)
    with on(), Living() as living, torch.set_grad_enabled(training):
        for _ in range(2):
            loss = model(torch.randn(3, SIDE)).square().mean()
            if training:
                loss.backward()
        alive = living.alive()
    assert living.made >= 16, "each gather has casts of its own"
    assert max(living.most, alive) == 1
