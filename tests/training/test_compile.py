"""torch.compile around and inside a sharded model: right gradients, or an error that says why.

Parameters change between steps, so that a compiled graph that remembers them would show. The ranks
are this file's own: the compiler changes much of torch.
"""

from __future__ import annotations

import threading
import types

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import loss_of, wrapped
from scenarios import (
    Stack,
    floats,
    forward_backward,
    mean_grads,
    near,
    stack,
    whole_grads,
)
from scripts import accumulate
from spawn import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import zshard
from zshard import FSDP, MixedPrecision

COMBINATIONS = (("full_shard", "shm"), ("shard_grad_op", "c10d"))  # a compilation costs a second
each_combination = pytest.mark.parametrize("combination", COMBINATIONS, ids=" ".join)


# --- ways to compile: (model, backend) -> the model to train --------------------------------------


def each_block_in_place(model, backend):
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def each_block_by_another_module(model, backend):
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend=backend)
    return model


def the_whole_in_place(model, backend):
    model.compile(backend=backend)
    return model


def the_whole_by_another_module(model, backend):
    return torch.compile(model, backend=backend)


WAYS = [
    each_block_in_place,
    each_block_by_another_module,
    the_whole_in_place,
    the_whole_by_another_module,
]


def check_compiled(build, run, way, backend, first, combination):
    """Gradients of a sharded model that is compiled before (`first`) or after it is wrapped are the
    mean over ranks, to rounding."""
    expected = mean_grads(build, run)
    torch._dynamo.reset()
    if first:
        model = wrapped(lambda: way(build(), backend), combination)
    else:
        model = way(wrapped(build, combination), backend)
    run(model, dist.get_rank())
    grads = {name.replace("_orig_mod.", ""): grad for name, grad in whole_grads(model).items()}
    ours = {name: near(grad, expected.get(name)) for name, grad in grads.items()}
    assert_same(ours, expected, "the gradients")


# --- models with something special inside ---------------------------------------------------------


class Recomputing(Stack):
    """Blocks that are recomputed in backward."""

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


THOROUGH = [
    pytest.param(Recomputing, way, "aot_eager", marks=pytest.mark.thorough)
    for way in (each_block_in_place, the_whole_in_place)
]


@pytest.mark.parametrize("first", [True, False], ids=["compiled, wrapped", "wrapped, compiled"])
@pytest.mark.parametrize(
    ("build", "way", "backend"),
    [
        *((Stack, way, "aot_eager") for way in WAYS),
        (Stack, each_block_in_place, "eager"),
        *THOROUGH,
    ],
)
@each_combination
@on_ranks(2)
def test_gradients_of_a_compiled_model(build, way, first, backend, combination):
    check_compiled(build, accumulate, way, backend, first, combination)


# --- gradients that exist when the compiler starts again ------------------------------------------

STRATEGIES = ("full_shard", "shard_grad_op", "zero1", "no_shard")
BF16 = MixedPrecision(param_dtype=torch.bfloat16)
LENGTHS = ((4, 6), (5, 9))  # of the micro-batches of each step


class Counting:
    """A backend that counts its compilations."""

    def __init__(self):
        self.compiled = 0

    def __call__(self, graph, inputs):
        self.compiled += 1
        return graph


def ordinary_loop(model, held):
    """Accumulation over other lengths, a step, an evaluation: losses and outputs."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    rank, seen = dist.get_rank(), []
    for step, lengths in enumerate(LENGTHS):
        optimizer.zero_grad()
        for rows in lengths:
            model.set_requires_gradient_sync(rows == lengths[-1] or not held)
            loss = loss_of(model(floats(rank, step, rows)))
            loss.backward()
            seen.append(loss.item())
        optimizer.step()
        model.eval()
        with torch.no_grad():
            seen.append(model(floats(rank, step, rows=3 + step)).sum().item())
        model.train()
    return seen


# Without shards the compiler sees held gradients, and takes none of another dtype.
LOOPS = [
    *((strategy, dynamic, None) for strategy in STRATEGIES for dynamic in (None, True)),
    *((strategy, None, BF16) for strategy in STRATEGIES if strategy != "no_shard"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize(("strategy", "dynamic", "precision"), LOOPS)
@on_ranks(2)
def test_training_loop_compiles(strategy, dynamic, precision, transport):
    """The results are those without it; at least two graphs, for training and for evaluation."""
    torch._dynamo.reset()
    seen, backend = [], Counting()
    for compiles in (False, True):
        model = wrapped(Stack, (strategy, transport), mixed_precision=precision)
        for block in model.blocks if compiles else ():
            block.compile(backend=backend, fullgraph=True, dynamic=dynamic)
        seen.append(ordinary_loop(model, held=dynamic is True))
    eager, compiled = seen
    assert compiled == pytest.approx(eager, rel=1e-6)
    assert backend.compiled >= 2


@on_ranks(2)
def test_optimizer_in_backward_of_compiled_blocks():
    """Losses of a model by fully_shard() that steps in backward, with other lengths."""
    torch._dynamo.reset()
    seen = []
    for compiles in (False, True):
        model, losses = stack(), []
        model.optimizer_in_backward(zshard.AdamW(model.parameters(), 0.01))
        for block in model.blocks if compiles else ():
            block.compile(backend="aot_eager", fullgraph=True)
        for step in range(3):
            loss = loss_of(model(floats(dist.get_rank(), step, rows=3 + step)))
            loss.backward()
            losses.append(loss.item())
        seen.append(losses)
    assert seen[1] == pytest.approx(seen[0], rel=1e-6)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_only_the_compiler_sees_grad_as_none(transport):
    """Eager code in forward, and another thread while the compiler traces, see the gradient."""
    torch._dynamo.reset()
    model = wrapped(Stack, ("full_shard", transport))
    block, eager, tracing, threads = model.blocks[0], [], [], []
    forward_backward(model, 0)

    def look(where):
        where.append(block.up.weight.grad is not None)

    def backend(graph, inputs):
        look(tracing)
        thread = threading.Thread(target=look, args=(threads,))
        thread.start()
        thread.join()
        raise RuntimeError("no such backend")

    block.register_forward_pre_hook(lambda *_: look(eager))
    block.down.register_forward_hook(lambda *_: look(eager))
    block.up.forward = torch.compile(block.up.forward, backend=backend)
    for _ in range(2):
        with pytest.raises(Exception, match="no such backend"):
            model(floats(0))
        look(eager)
    del block.up.forward
    forward_backward(model, 0)
    assert (set(eager), set(tracing), set(threads)) == ({True}, {False}, {True})


@on_ranks(2)
def test_compiled_autograd_is_refused_with_a_remedy():
    """The remedy in the error: the model is compiled, and backward() runs outside of it."""
    torch._dynamo.reset()
    model = wrapped(Stack, ("full_shard", "shm"))
    loss = loss_of(model(floats(0)))
    enabled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    with enabled, pytest.raises(NotImplementedError, match=r"torch\.compile\(model\)"):
        loss.backward()
    forward_backward(torch.compile(model, backend="eager"), dist.get_rank())
    assert_same(whole_grads(model), mean_grads(Stack, forward_backward), "the gradients")


# --- a model of many classes ----------------------------------------------------------------------


def block_of_its_own_class(number):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.layer(x))

    # Each class has its own code, as written classes do: torch limits the compilations of one.
    code = forward.__code__.replace(co_name=f"forward_{number}")
    Block.forward = types.FunctionType(code, globals())
    return Block()


def operations_compiled(wrap):
    """Return how many operations of each graph were compiled, and the losses."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = wrap(nn.Sequential(*map(block_of_its_own_class, range(4))))
    found, losses = [], []

    def backend(graph, _):
        found.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph

    compiled = torch.compile(model, backend=backend)
    with torch._dynamo.config.patch(recompile_limit=2):  # fewer than there are classes
        for _ in range(2):
            losses.append(compiled(torch.ones(2, 8)).square().mean())
            losses[-1].backward()
    return sum(found), [loss.item() for loss in losses]


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(2)
def test_units_of_many_classes_are_all_compiled(strategy):
    def sharded(model):
        kinds = {type(block) for block in model}
        return FSDP(model, auto_wrap_policy=kinds, strategy=strategy)

    ours = operations_compiled(sharded)
    plain = operations_compiled(lambda model: model)
    assert ours == plain
