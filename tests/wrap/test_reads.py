"""Weights that another module's forward reads: the operation gathers their unit.

Whichever module owns the weights and whatever the policy, a model trains as the plain one. Each
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
from models import COMBINATIONS, differences, make
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


def reads_a_weight(self: Any, x: Tensor) -> Tensor:
    return F.linear(self.layers(x), self.side.weight)


def reads_before_the_call(self: Any, x: Tensor) -> Tensor:
    return self.side(self.layers(x * self.side.weight.mean()))  # type: ignore[no-any-return]


def reads_after_the_call(self: Any, x: Tensor) -> Tensor:
    return F.linear(self.layers(self.side(x)), self.side.weight)


def reads_a_transpose(self: Any, x: Tensor) -> Tensor:
    return self.layers(x) @ self.side.weight.T  # type: ignore[no-any-return]


def reads_elementwise(self: Any, x: Tensor) -> Tensor:
    return F.linear(self.layers(x), self.side.weight * 0.5 + self.scale)


def reads_rows(self: Any, x: Tensor) -> Tensor:
    return F.linear(self.layers(x), self.side.weight[2:5])


def reads_detached(self: Any, x: Tensor) -> Tensor:
    return F.linear(self.layers(x), self.side.weight.detach())


def reads_data(self: Any, x: Tensor) -> Tensor:
    return F.linear(self.layers(x), self.side.weight.data)


def reads_sizes(self: Any, x: Tensor) -> Tensor:
    rows, columns = self.side.weight.shape
    return self.side(self.layers(x)) / columns + rows + self.side.bias.numel()  # type: ignore[no-any-return]


def reads_through_a_getter(self: Any, x: Tensor) -> Tensor:
    return F.linear(self.layers(x), self.get_side().weight, self.extra["side"].bias)


def reads_in_a_closure(self: Any, x: Tensor) -> Tensor:
    return (lambda y: F.linear(y, self.side.weight))(self.layers(x))


def reads_in_a_loop(self: Any, x: Tensor) -> Tensor:
    norms = [block[0].weight.norm() for block in self.layers]
    return self.layers(x) * torch.stack(norms).sum()  # type: ignore[no-any-return]


def reads_many_at_once(self: Any, x: Tensor) -> Tensor:
    weight = torch.cat([block[0].weight for block in self.layers])
    return F.linear(self.layers(x), weight)


def reads_while_a_view_lives(self: Any, x: Tensor) -> Tensor:
    view = self.side.weight.t()
    others = sum(block[1].weight.sum() for block in self.layers)
    return self.layers(x) @ view + others  # type: ignore[no-any-return]


def reads_in_a_function(self: Any, x: Tensor) -> Tensor:
    return Times.apply(self.layers(x), self.side.weight)  # type: ignore[no-any-return]


def reads_an_attention(self: Any, x: Tensor) -> Tensor:
    x, own = self.layers(x)[:, None], self.attention
    weights = own.in_proj_weight, own.in_proj_bias, None, None, False, 0.0
    found = F.multi_head_attention_forward(
        x, x, x, WIDTH, 2, *weights, own.out_proj.weight, own.out_proj.bias
    )
    return found[0][:, 0]


def reads_in_a_checkpoint(self: Any, x: Tensor) -> Tensor:
    x = self.layers(x)
    return checkpoint(lambda y: F.linear(y, self.side.weight), x, use_reentrant=False)  # type: ignore[no-any-return]


def reads_in_a_reentrant_checkpoint(self: Any, x: Tensor) -> Tensor:
    x = self.layers(x)
    return checkpoint(lambda y: F.linear(y, self.side.weight), x, use_reentrant=True)  # type: ignore[no-any-return]


def calls_forward(self: Any, x: Tensor) -> Tensor:
    return self.side.forward(self.layers(x))  # type: ignore[no-any-return]


def calls_another_method(self: Any, x: Tensor) -> Tensor:
    return self.side(self.layers(self.layers[3].first_only(x)))  # type: ignore[no-any-return]


def calls_parts(self: Any, x: Tensor) -> Tensor:
    for number, block in enumerate(self.layers):
        x = block[1](block[0](x)) + number
    return self.side(x)  # type: ignore[no-any-return]


def calls_sliced_container(self: Any, x: Tensor) -> Tensor:
    return self.side(self.layers[:2](x))  # type: ignore[no-any-return]


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


READS = [
    *(reads_a_weight, reads_before_the_call, reads_after_the_call, reads_a_transpose),
    *(
        reads_elementwise,
        reads_rows,
        reads_detached,
        reads_data,
        reads_sizes,
        reads_through_a_getter,
    ),
    *(reads_in_a_closure, reads_in_a_loop, reads_many_at_once, reads_while_a_view_lives),
    *(reads_in_a_function, reads_an_attention, reads_in_a_checkpoint),
    *(reads_in_a_reentrant_checkpoint, calls_forward, calls_another_method, calls_parts),
    *(calls_sliced_container, checkpoints_parts, takes_a_gradient_between),
]
POLICIES = {
    "auto": "auto",
    "blocks": {Pair, nn.Linear, nn.MultiheadAttention},
    "parts": {nn.Linear, nn.MultiheadAttention},
}


def build(forward: Any) -> nn.Module:
    return type("Model", (Reader,), {"forward": forward})()  # type: ignore[no-any-return]


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


def wrong_in(forward: Any, policy: str, combination: tuple[str, str], frozen: bool = False) -> Any:
    """Return what differs from the plain model: losses, outputs in evaluation, and weights after
    training. All ranks have the same batches, so that the mean of the gradients is bit-identical to
    each rank's."""
    strategy, transport = combination
    plain = make(functools.partial(build, forward))
    plain.side.requires_grad_(not frozen)  # type: ignore[union-attr]
    model = FSDP(
        copy.deepcopy(plain),
        strategy=strategy,
        transport=transport,
        auto_wrap_policy=POLICIES[policy],
    )
    batches = list(torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0)))
    ours, theirs = train(model, batches), train(plain, batches)
    return differences(
        {"losses": ours, **model.state_dict()}, {"losses": theirs, **plain.state_dict()}
    )


@pytest.mark.sampled(12)
@pytest.mark.parametrize("combination", [*COMBINATIONS, ("hybrid_full", "c10d")])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("forward", READS)
def test_forward_that_bypasses_a_module(pool2: Any, forward, policy, combination) -> None:
    assert pool2.run(wrong_in, forward, policy, combination) == [[], []]


@pytest.mark.parametrize("combination", [("full_shard", "c10d"), ("shard_grad_op", "shm")])
def test_reads_of_frozen_weights(pool2: Any, combination) -> None:
    assert pool2.run(wrong_in, reads_after_the_call, "parts", combination, True) == [[], []]


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


def gathered_at_a_time(holds: bool, transport: str) -> list[list[int]]:
    plain = make(functools.partial(Watching, holds))
    model = FSDP(plain, transport=transport, auto_wrap_policy={nn.Linear}, forward_prefetch=0)
    found = []
    for _ in range(2):
        model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
        found.append(list(model.module.seen))
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    found.append(list(model.module.seen))
    assert not any(each._zshard_state.unit.is_full for each in plain.blocks)
    return found


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_loop_over_weights_gathers_one_at_a_time(pool2: Any, transport) -> None:
    """Where autograd needs them in backward, it refers to them, and they stay."""
    assert pool2.run(gathered_at_a_time, False, transport) == [[[1] * 4] * 3] * 2
    for training, again, evaluation in pool2.run(gathered_at_a_time, True, transport):
        assert training == again == [1, 2, 3, 4]
        assert evaluation[-1] < 4


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
    """Return the embedding's line of the summary, whether it mentioned reads before, and the
    predicted and actual bytes of slots after each step."""
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
    model = FSDP(make(functools.partial(build, reads_a_weight)), auto_wrap_policy={nn.Linear})
    side = model.module.side
    message = message_of(lambda: F.linear(torch.ones(2, WIDTH), side.weight), zshard.ShardError)
    assert "linear() was called on a shard" in message


def on_one_rank_alone() -> tuple[int, float]:
    """Rank 0 evaluates alone, over shm."""
    build_one = functools.partial(build, reads_a_weight)
    model = FSDP(make(build_one), transport="shm", auto_wrap_policy={nn.Linear})
    plain = make(functools.partial(build, reads_a_weight))
    found, x = 0.0, torch.ones(2, WIDTH)
    if dist.get_rank() == 0:
        with torch.no_grad():
            found = (model(x) - plain(x)).abs().max().item()
    dist.barrier()
    return dist.get_rank(), found


def test_one_rank_may_evaluate_alone(pool2: Any) -> None:
    assert pool2.run(on_one_rank_alone) == [(0, 0.0), (1, 0.0)]


class Raising(nn.Module):
    """Raises once, after a read."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.raises = True

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(self.inner(x), self.side.weight)
        if self.raises:
            self.raises = False
            raise ValueError("planted")
        return x


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_forward_that_raises_after_a_read(transport):
    plain = make(Raising)
    model = FSDP(copy.deepcopy(plain), transport=transport, auto_wrap_policy={nn.Linear})
    found = []
    for each in (model, plain):
        message_of(lambda each=each: each(torch.ones(2, WIDTH)), ValueError)
        loss = each(torch.ones(2, WIDTH)).sum()
        loss.backward()
        found.append(loss.detach())
    assert differences(*found) == []
