"""Scenarios: forwards and backwards of one rank as scripts do them, and their expected results.

The expected results need no library: every rank can create all ranks' batches, so it runs each
rank's scenario on a plain model and takes the mean.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import assert_same, differences
from groups import own_group
from models import COMBINATIONS, Block, loss_of, make, wrapped
from torch import Tensor, nn

import zshard
from zshard import FSDP, fully_shard
from zshard.model import shard_model

WIDTH = 9
FULL = ("full_shard", "shm")

Run = Callable[[nn.Module, int], Any]  # a scenario: (model, rank)
Grads = dict[str, "Tensor | None"]


def floats(rank, step=0, rows=4):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


class Stack(nn.Module):
    """Blocks one after another, each a unit."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Wide(nn.Module):
    """Shards have entire pages: wide enough for every rank to have a shard."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 128)
        self.second = nn.Linear(128, 64)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def built(combination, build=Wide, **options):
    """Return a model on its own transports: a test may leave them broken."""
    options = {"process_group": own_group(), "timeout": 20, **options}
    return wrapped(build, combination, **options)


def learn(model, optimizer, step, stepping=True):
    """One step of training, on this rank's batch."""
    optimizer.zero_grad()
    loss_of(model(floats(dist.get_rank(), step))).backward()
    if stepping:
        optimizer.step()


def whole(model):
    """Return a copy of the model's state."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def forward_backward(model, rank):
    loss_of(model(floats(rank))).backward()


def square_sum(model):
    return sum(p.square().sum() for p in model.parameters())


def message_of(action, kind=Exception):
    """Return the text of the exception that `action` raises; fails if it raises none."""
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


def whole_grads(model: nn.Module) -> Grads:
    """Return the reduced full gradients of a sharded model, assembled from all ranks' shards."""
    mine: dict[str, tuple[int, Tensor | None]] = {}
    shapes: dict[str, torch.Size] = {}
    for name, param in model.named_parameters():
        info = zshard.shard_info(param) or {"begin": 0, "shape": param.shape}
        grad = param.grad
        if grad is not None and grad.shape != param.shape:
            raise AssertionError(f"{name}: .grad of {grad.shape} for a slice of {param.shape}")
        mine[name] = (
            info["begin"],
            None if grad is None else zshard.to_local(grad).flatten().clone(),
        )
        shapes[name] = torch.Size(info["shape"])
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: _joined(name, [part[name] for part in everyone], shapes[name]) for name in mine}


def all_grads(model: nn.Module) -> dict[str, Tensor]:
    """The same where each parameter must have one: None on both sides would compare nothing."""
    found = whole_grads(model)
    assert [name for name, grad in found.items() if grad is None] == []
    return {name: grad for name, grad in found.items() if grad is not None}


def _joined(name: str, parts: list[tuple[int, Tensor | None]], shape: torch.Size) -> Tensor | None:
    grads = [grad for _, grad in parts if grad is not None]
    if not grads:
        return None
    if len(grads) < len(parts):
        raise AssertionError(f"{name} has a .grad on some ranks only")
    if all(grad.numel() == shape.numel() for grad in grads):  # not sharded
        for rank, grad in enumerate(grads):
            assert_same(grad, grads[0], f"{name}: .grad of rank {rank}, from rank 0's,")
        return grads[0].reshape(shape)
    slices: dict[int, Tensor] = {}
    for begin, grad in parts:  # other replicas of the model (hybrid) have the same shards
        if grad is None or grad.numel() == 0:
            continue
        assert_same(grad, slices.setdefault(begin, grad), f"{name}: .grad of another rank")
    if sum(grad.numel() for grad in slices.values()) != shape.numel():
        raise AssertionError(f"{name}: the ranks' slices are not the whole")
    whole = torch.full((shape.numel(),), torch.nan, dtype=grads[0].dtype)
    for begin, grad in slices.items():
        whole[begin : begin + grad.numel()] = grad
    return whole.reshape(shape)


def mean_grads(build: Callable[[], nn.Module], run: Run) -> Grads:
    """Return the expected gradients: each rank's, by a plain model, and their mean; one that only
    some ranks use counts as zero on the others."""
    world = dist.get_world_size()
    models = [make(build) for _ in range(world)]
    for rank, model in enumerate(models):
        run(model, rank)
    total: Grads = {}
    for name, param in models[0].named_parameters():
        grads = [dict(model.named_parameters())[name].grad for model in models]
        if all(grad is None for grad in grads):
            total[name] = None
            continue
        summed = torch.zeros(param.shape, dtype=param.dtype)
        for grad in grads:
            summed = summed if grad is None else summed + grad.detach().to_dense()
        total[name] = summed / world
    return total


def wrong_grads(ours: Grads, expected: Grads) -> list[str]:
    """Return the names whose gradient differs in any bit, or should not exist."""
    return differences(ours, expected)


def wrong_in(build, run, exact, combinations=COMBINATIONS, policy="auto"):
    """Return {combination: the gradients that are not the mean of the ranks'}; {} if all are
    correct.

    exact: bit-identical. Otherwise to 1e-6: where sums of several backwards are reduced one by one,
    the plain model adds them in another order.
    """
    expected = mean_grads(build, run)
    assert any(grad is not None and grad.abs().sum() > 0 for grad in expected.values())
    found = {}
    for combination in combinations:
        model = wrapped(build, combination, auto_wrap_policy=policy)
        run(model, dist.get_rank())
        ours = whole_grads(model)
        if not exact:
            ours = {name: near(ours[name], expected.get(name)) for name in ours}
        wrong = wrong_grads(ours, expected)
        if wrong:
            found[combination] = wrong
    return found


def near(ours, expected):
    """Return `expected` itself where `ours` differs from it by rounding only."""
    both = ours is not None and expected is not None
    close = both and torch.allclose(ours, expected, rtol=2e-6, atol=1e-6)
    return expected if close else ours


def check_mean_grads(build, run, exact, combinations=COMBINATIONS, policy="auto"):
    """Fail unless the reduced gradients are the mean of the ranks', under every combination."""
    assert wrong_in(build, run, exact, combinations, policy) == {}


# --- models under fully_shard() ----------------------------------------------------------------------


@contextlib.contextmanager
def over(transport):
    """fully_shard has no argument for the transport: set the environment variable."""
    before = os.environ.get("ZSHARD_TRANSPORT")
    os.environ["ZSHARD_TRANSPORT"] = transport
    try:
        yield
    finally:
        del os.environ["ZSHARD_TRANSPORT"]
        if before is not None:
            os.environ["ZSHARD_TRANSPORT"] = before


def unit_of(module):
    """Return the C part of a unit."""
    return module._zshard_state.unit


def units_of(model):
    return [unit_of(module) for module in FSDP.fsdp_modules(model)]


def transport_of(model):
    return model._zshard_state.comms.all.transport


@contextlib.contextmanager
def units_made_by(make):
    """Context manager in which `make(usual, *arguments)` makes the C part of each unit."""
    usual = shard_model.make_unit
    shard_model.make_unit = functools.partial(make, usual)
    try:
        yield
    finally:
        shard_model.make_unit = usual


def stack(**options):
    model = make(Stack)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)
