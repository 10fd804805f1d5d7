"""Backward unshards a unit wherever its graph enters the nodes of the unit's forward.

An output may leave a forward in any way, or be kept elsewhere: gradients are bit-identical to the
plain model's.
"""

from __future__ import annotations

import collections
import functools
import itertools
import threading
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import COMBINATIONS, Block, Parts, loss_of, wrapped
from scenarios import (
    WIDTH,
    Stack,
    check_mean_grads,
    floats,
    forward_backward,
    mean_grads,
    square_sum,
    whole_grads,
)
from spawn import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from zshard import FSDP

FULL = [("full_shard", "shm"), ("full_shard", "c10d")]
HYBRID = [("hybrid_shard", "c10d"), ("hybrid_full", "c10d")]

# --- ways for a result to leave a forward other than its return value -----------------------------


class Slotted:
    """An object without a __dict__."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Way(NamedTuple):
    """The way of a block's result to the model: (module, result, box)."""

    give: Any
    take: Any


def _onto_module(module, y, box):
    module.kept = y
    return y.detach()


def _deep(module, y, box):
    return functools.reduce(lambda inner, _: [inner], range(12), y)


def _from_deep(module, out, box):
    while isinstance(out, list):
        out = out[0]
    return out


def _written_view(module, out, box):
    out[0].add_(out[0] * 0.5)
    return out[0]


WAYS = {
    "a tensor": Way(lambda m, y, box: y, lambda m, out, box: out),
    "a tuple": Way(lambda m, y, box: (y, y.mean()), lambda m, out, box: out[0] + out[1]),
    "a dict": Way(lambda m, y, box: {"y": [y]}, lambda m, out, box: out["y"][0]),
    "an argument": Way(lambda m, y, box: box.append(y), lambda m, out, box: box[0]),
    "the module": Way(_onto_module, lambda m, out, box: m.kept),
    "a deque": Way(lambda m, y, box: collections.deque([y]), lambda m, out, box: out[0]),
    "a set": Way(lambda m, y, box: {y}, lambda m, out, box: next(iter(out))),
    "slots": Way(lambda m, y, box: Slotted(y), lambda m, out, box: out.value),
    "a closure": Way(lambda m, y, box: lambda: y, lambda m, out, box: out()),
    "a generator": Way(lambda m, y, box: (t for t in [y]), lambda m, out, box: next(out)),
    "deep lists": Way(_deep, _from_deep),
    "a view": Way(lambda m, y, box: (y * 2)[None], lambda m, out, box: out[0]),
    "a written view": Way(lambda m, y, box: (y * 2)[None], _written_view),
    "a NamedTuple": Way(
        lambda m, y, box: torch.return_types.max((y, y)), lambda m, out, box: out.values
    ),
}


class Giving(Block):
    """A block that passes its result in some way."""

    way = "a tensor"

    def forward(self, x, box):
        return WAYS[self.way].give(self, super().forward(x), box)


class Taking(nn.Module):
    """Blocks, one after the other. how: "eager", or checkpointed ("reentrant", "non-reentrant")."""

    def __init__(self, way, how="eager"):
        super().__init__()
        self.blocks = nn.ModuleList(Giving(WIDTH) for _ in range(3))
        for block in self.blocks:
            block.way = way
        self.head = nn.Linear(WIDTH, 2)
        self.way, self.how = way, how

    def _block(self, block, x):
        box = []
        return WAYS[self.way].take(block, block(x, box), box)

    def forward(self, x):
        for block in self.blocks:
            if self.how == "eager":
                x = self._block(block, x)
            else:
                x = checkpoint(self._block, block, x, use_reentrant=self.how == "reentrant")
        return self.head(x)


def two_steps(model, rank):
    for _ in range(2):
        model.zero_grad()
        loss_of(model(floats(rank).requires_grad_())).backward()


# --- each way, learned ----------------------------------------------------------------------------

# A reentrant checkpoint runs its forward without a graph: nothing to keep on the module.
HOW = ("eager", "non-reentrant", "reentrant")
WAYS_AND_HOW = [w for w in itertools.product(WAYS, HOW) if w != ("the module", "reentrant")]
POLICIES = {"one unit": None, "nested": {Giving, Block}}


@pytest.mark.sampled(14)
@pytest.mark.parametrize("combination", [*COMBINATIONS, *HYBRID])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("way", "how"), WAYS_AND_HOW)
@on_ranks(2)
def test_backward_from_any_kind_of_output(way, how, policy, combination):
    build = functools.partial(Taking, way, how)
    check_mean_grads(build, two_steps, True, [combination], POLICIES[policy])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("combination", FULL)
@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("a closure", "a generator")])
@on_ranks(2)
def test_backward_from_outputs_of_compiled_blocks(way, combination):
    torch._dynamo.reset()
    model = wrapped(lambda: Taking(way), combination, auto_wrap_policy={Giving})
    for block in model.module.blocks:
        block.compile(backend="aot_eager")
    two_steps(model, dist.get_rank())
    ours, expected = whole_grads(model), mean_grads(lambda: Taking(way), two_steps)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


# --- results that are kept in addition to the output ----------------------------------------------


def keeping(leaks=False):
    """A model that keeps each block's result, which no other block sees. `leaks`: the output
    does not depend on the blocks."""

    def forward(model, x):
        model.kept = []
        for block in model.blocks:
            model.kept.append(block.up(block(x)))
            x = x * 2 if leaks else block(x)
        return model.head(x)

    blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
    return Parts(forward, blocks=blocks, head=nn.Linear(WIDTH, 2))


def first_kept(model, rank):
    model(floats(rank))
    model.kept[1].square().sum().backward()


def both(model, rank):
    out = model(floats(rank))
    (loss_of(out) + model.kept[0].square().sum()).backward()


def kept_before_the_output(model, rank):
    out = model(floats(rank))
    model.kept[2].square().sum().backward(retain_graph=True)
    loss_of(out).backward()


def output_twice(model, rank):
    loss = loss_of(model(floats(rank)))
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()


def two_forwards_in_turn(model, rank):
    first = loss_of(model(floats(rank)))
    second = loss_of(model(floats(rank, step=1)))
    (first * second).backward()


RUNS = [first_kept, both, kept_before_the_output, output_twice, two_forwards_in_turn]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("combination", [*COMBINATIONS, *HYBRID])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("leaks", [False, True])
@on_ranks(2)
def test_backward_from_kept_intermediates(leaks, run, policy, combination):
    exact = run is not kept_before_the_output  # its two backwards are reduced one by one
    build = functools.partial(keeping, leaks)
    check_mean_grads(build, run, exact, [combination], POLICIES[policy])


# --- where and when a forward ran -----------------------------------------------------------------


def backward_of_a_very_old_graph(model, rank):
    """The graph is older than 20,000 forwards of units."""
    loss = loss_of(model(floats(rank)))
    for _ in range(5_000 if isinstance(model, FSDP) else 0):
        model(floats(rank, rows=1))
    loss.backward()


def forward_in_another_thread(model, rank):
    losses = []
    thread = threading.Thread(target=lambda: losses.append(loss_of(model(floats(rank)))))
    thread.start()
    thread.join()
    losses[0].backward()


def penalty_computed_in_summon_full_params(model, rank):
    if not isinstance(model, FSDP):
        square_sum(model).backward()
        return
    with model.summon_full_params(model):
        penalty = square_sum(model)
    penalty.backward()


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(backward_of_a_very_old_graph, marks=pytest.mark.thorough),
        forward_in_another_thread,
        penalty_computed_in_summon_full_params,
    ],
)
@pytest.mark.sampled(2)
@on_ranks(2)
def test_backward_of_other_forwards(run):
    check_mean_grads(Stack, run, True, FULL)


@torch.jit.script
def backward_in_cpp(loss: torch.Tensor):
    loss.backward()


@pytest.mark.parametrize(("transport", "refused"), [("shm", True), ("c10d", False)])
@on_ranks(2)
def test_backward_started_in_cpp_is_right_or_an_error(transport, refused):
    """Over c10d the outermost unit stays gathered, so its hooks open the backward."""
    model = wrapped(keeping, ("full_shard", transport), auto_wrap_policy={Block})
    loss = loss_of(model(floats(dist.get_rank())))
    if refused:
        with pytest.raises(RuntimeError, match="sharded"):
            backward_in_cpp(loss)
        model.zero_grad()
        forward_backward(model, dist.get_rank())
    else:
        backward_in_cpp(loss)
    assert_same(whole_grads(model), mean_grads(keeping, forward_backward), "the gradients")


# --- parameters that a backward reads -------------------------------------------------------------


class Reversible(torch.autograd.Function):
    """Recomputes its inputs in backward; its layers' gradients come from a backward within."""

    @staticmethod
    def forward(ctx, block, x, y, *params):
        with torch.no_grad():
            x = x + block.f(y)
            y = y + block.g(x)
        ctx.block, ctx.n = block, len(params)
        ctx.save_for_backward(x, y)
        return x, y

    @staticmethod
    def backward(ctx, *grads):
        (x, y), block = ctx.saved_tensors, ctx.block
        with torch.no_grad():
            y = y - block.g(x)
            x = x - block.f(y)
        with torch.enable_grad():
            x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
            first = x + block.f(y)
            torch.autograd.backward((first, y + block.g(first)), grads)
        return None, x.grad, y.grad, *[None] * ctx.n


def reading(reversible):
    """A hook in the forward's graph reads a parameter of a unit that has not been called."""

    def forward(model, x):
        x = x * model.scale
        if reversible:
            params = (*model.f.parameters(), *model.g.parameters())
            return torch.cat(Reversible.apply(model, x, x + 1, *params), -1)
        other = model.other.weight
        x.register_hook(lambda grad: (grad * other.square().sum()) @ other.detach())
        return model.g(torch.tanh(model.f(x)))

    layers = {name: nn.Linear(WIDTH, WIDTH) for name in ("f", "g", "other")}
    return Parts(forward, **layers, scale=nn.Parameter(torch.full((WIDTH,), 0.5)))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("reversible", [True, False], ids=["reversible", "hook"])
@on_ranks(2)
def test_backward_reads_parameters(reversible, combination):
    build = functools.partial(reading, reversible)
    check_mean_grads(build, two_steps, reversible, [combination], {nn.Linear})
