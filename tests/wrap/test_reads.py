"""Weights that another module's forward reads: the operation gathers their unit.

For any owner of the weights and any policy, a model trains as the plain one. Each
case is a forward that bypasses a module: it reads a weight, or calls a submodule of a unit.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compare import assert_same
from models import COMBINATIONS, make
from scenarios import message_of
from spawn import on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zshard
from zshard import FSDP

WIDTH = 8


class Pair(nn.Sequential):
    """Two layers, as a block."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(super().forward(x))

    def first_only(self, x: Tensor) -> Tensor:
        return self[0](x)  # type: ignore[no-any-return]


class Times(torch.autograd.Function):
    """A custom Function that saves a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class Reader(nn.Module):
    """Four blocks, two Linears and an attention, whose forward bypasses modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Pair() for _ in range(4)))
        self.side = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.ModuleDict({"side": nn.Linear(WIDTH, WIDTH)})
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def get_side(self) -> nn.Linear:
        return self.side

    def blocks(self) -> list[Any]:
        return list(self.layers)


def attends(self: Any, x: Tensor) -> Tensor:
    x, own = self.layers(x)[:, None], self.attention
    weights = own.in_proj_weight, own.in_proj_bias, None, None, False, 0.0
    return F.multi_head_attention_forward(
        x, x, x, WIDTH, 2, *weights, own.out_proj.weight, own.out_proj.bias
    )[0][:, 0]


def reads_while_a_view_lives(self: Any, x: Tensor) -> Tensor:
    view = self.side.weight.t()
    others = sum(block[1].weight.sum() for block in self.layers)
    return self.layers(x) @ view + others  # type: ignore[no-any-return]


def calls_parts(self: Any, x: Tensor) -> Tensor:
    for number, block in enumerate(self.layers):
        x = block[1](block[0](x)) + number
    return self.side(x)  # type: ignore[no-any-return]


def checkpoints_parts(self: Any, x: Tensor) -> Tensor:
    for block in self.layers:
        x = checkpoint(block[0], x, use_reentrant=False)
    return self.side(x)  # type: ignore[no-any-return]


def takes_a_gradient_between(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        energy = F.linear(self.layers(y), self.side.weight).square().sum()
        (force,) = torch.autograd.grad(energy, y, create_graph=self.training)
    return F.linear(x + 0.01 * force, self.side.weight) * self.scale


def within_a_checkpoint(reentrant: bool) -> Any:
    return lambda m, x: checkpoint(
        lambda y: F.linear(y, m.side.weight), m.layers(x), use_reentrant=reentrant
    )


FORWARDS: dict[str, Any] = {  # of a Reader, which bypass a module
    "a weight": lambda m, x: F.linear(m.layers(x), m.side.weight),
    "before the call": lambda m, x: m.side(m.layers(x * m.side.weight.mean())),
    "after the call": lambda m, x: F.linear(m.layers(m.side(x)), m.side.weight),
    "a transpose": lambda m, x: m.layers(x) @ m.side.weight.T,
    "elementwise": lambda m, x: F.linear(m.layers(x), m.side.weight * 0.5 + m.scale),
    "rows": lambda m, x: F.linear(m.layers(x), m.side.weight[2:5]),
    "detached": lambda m, x: F.linear(m.layers(x), m.side.weight.detach()),
    "data": lambda m, x: F.linear(m.layers(x), m.side.weight.data),
    "sizes": lambda m, x: m.side(m.layers(x)) / m.side.weight.shape[1] + m.side.bias.numel(),
    "through a getter": lambda m, x: F.linear(
        m.layers(x), m.get_side().weight, m.extra["side"].bias
    ),
    "in a closure": lambda m, x: (lambda y: F.linear(y, m.side.weight))(m.layers(x)),
    "in a loop": lambda m, x: m.layers(x) * sum(block[0].weight.norm() for block in m.layers),
    "many at once": lambda m, x: F.linear(
        m.layers(x), torch.cat([block[0].weight for block in m.layers])
    ),
    "while a view lives": reads_while_a_view_lives,
    "in a function": lambda m, x: Times.apply(m.layers(x), m.side.weight),
    "an attention": attends,
    "in a checkpoint": within_a_checkpoint(False),
    "in a reentrant checkpoint": within_a_checkpoint(True),
    "forward()": lambda m, x: m.side.forward(m.layers(x)),
    "another method": lambda m, x: m.side(m.layers(m.layers[3].first_only(x))),
    "parts": calls_parts,
    "a sliced container": lambda m, x: m.side(m.layers[:2](x)),
    "checkpointed parts": checkpoints_parts,
    "a gradient between": takes_a_gradient_between,
}
POLICIES = {
    "auto": "auto",
    "blocks": {Pair, nn.Linear, nn.MultiheadAttention},
    "parts": {nn.Linear, nn.MultiheadAttention},
}


def build(forward: str) -> nn.Module:
    return type("Model", (Reader,), {"forward": FORWARDS[forward]})()  # type: ignore[no-any-return]


def train(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """Return the losses of two steps, an evaluation after each, and a backward that runs twice."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05)
    found = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward(retain_graph=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            found += [loss.detach(), model.eval()(batch).sum()]
        model.train()
    return found


def check(forward: str, policy: str, combination: tuple[str, str], frozen: bool = False) -> None:
    """Compare losses, outputs in evaluation and weights with the plain model's. All ranks have the same
    batches, so that the mean of the gradients is bit-identical to each rank's."""
    strategy, transport = combination
    plain: Any = make(functools.partial(build, forward))
    plain.side.requires_grad_(not frozen)
    how = {"transport": transport, "auto_wrap_policy": POLICIES[policy]}
    model = FSDP(copy.deepcopy(plain), strategy=strategy, **how)
    batches = list(torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0)))
    assert_same(train(model, batches), train(plain, batches), "the losses")
    assert_same(model.state_dict(), plain.state_dict(), "the state")


@pytest.mark.sampled(12)
@pytest.mark.parametrize("combination", [*COMBINATIONS, ("hybrid_full", "c10d")])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("forward", FORWARDS)
@on_ranks(2)
def test_forward_that_bypasses_a_module(forward, policy, combination):
    check(forward, policy, combination)


@pytest.mark.parametrize("combination", [("full_shard", "c10d"), ("shard_grad_op", "shm")])
@on_ranks(2)
def test_reads_of_frozen_weights(combination):
    check("after the call", "parts", combination, frozen=True)


# --- how long weights stay gathered ----------------------------------------------------------------


class Watching(nn.Module):
    """Reads the weights of all blocks, and records which of them are gathered after each read."""

    def __init__(self, holds: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.holds = holds
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = []
        for block in self.blocks:
            kept = block.weight.t() if self.holds else block.weight.norm()
            x = x @ kept if self.holds else x * kept
            self.seen.append(sum(each._zshard_state.unit.is_full for each in self.blocks))
        return x


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("holds", [False, True])
@on_ranks(2)
def test_loop_over_weights_gathers_one_at_a_time(holds, transport):
    """If autograd needs them in backward, it refers to them, and they stay."""
    plain = make(functools.partial(Watching, holds))
    model = FSDP(plain, transport=transport, auto_wrap_policy={nn.Linear}, forward_prefetch=0)
    for _ in range(2):
        model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
        assert model.module.seen == ([1, 2, 3, 4] if holds else [1] * 4)
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    assert model.module.seen[-1] < 4 if holds else model.module.seen == [1] * 4
    assert not any(each._zshard_state.unit.is_full for each in plain.blocks)


class Tied(nn.Module):
    """Its head is the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Pair() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embed.weight)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_tied_head_is_reported_and_counted(transport):
    model = FSDP(make(Tied), transport=transport, auto_wrap_policy={nn.Embedding, Pair})
    before = "read by" in model.summary()
    predicted, peaks = [], []
    for _ in range(4):
        model(torch.arange(8)[None]).sum().backward()
        model.zero_grad()
        predicted.append(model.memory("predicted").get("slots", 0))
        peaks.append(model.memory("peak").get("slots", 0))
    line = next(line for line in model.summary().splitlines() if line.startswith("embed"))
    assert "read by (root)" in line and not before
    assert len(set(predicted[1:])) == len(set(peaks[1:])) == 1, "memory grows after a step"
    assert peaks[-1] <= predicted[-1]


# --- writes, and reads outside of forwards ---------------------------------------------------------


@on_ranks(2)
def test_no_gather_outside_of_forwards():
    model = FSDP(make(functools.partial(build, "a weight")), auto_wrap_policy={nn.Linear})
    side = model.module.side
    message = message_of(lambda: F.linear(torch.ones(2, WIDTH), side.weight), zshard.ShardError)
    assert "linear() was called on a shard" in message


@on_ranks(2)
def test_one_rank_may_evaluate_alone():
    plain = make(functools.partial(build, "a weight"))
    model = FSDP(copy.deepcopy(plain), transport="shm", auto_wrap_policy={nn.Linear})
    if dist.get_rank() == 0:
        with torch.no_grad():
            assert_same(model(torch.ones(2, WIDTH)), plain(torch.ones(2, WIDTH)), "the output")
    dist.barrier()


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_forward_that_raises_after_a_read(transport):
    def fail(*_):
        raise ValueError("planted")

    plain, x = make(functools.partial(build, "before the call")), torch.ones(2, WIDTH)
    model = FSDP(copy.deepcopy(plain), transport=transport, auto_wrap_policy={nn.Linear})
    hook = model.layers[3].register_forward_hook(fail)
    message_of(lambda: model(x), ValueError)
    hook.remove()
    for each in (model, plain):
        each(x).sum().backward()
    assert_same(model(x), plain(x), "the output")
