"""torch.compile around and inside a sharded model: right gradients, or an error that says why.

Parameters change between steps, so that a compiled graph that remembers them would show. The ranks
are this file's own: the compiler changes much of torch.
"""

from __future__ import annotations

import contextlib
import threading
import types

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import loss_of, make, wrapped
from scenarios import WIDTH, Stack, floats, mean_grads, message_of, near, whole_grads
from spawn import on_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zshard
from zshard import FSDP, MixedPrecision, fully_shard

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


def plain_name(name):
    return name.replace("_orig_mod.", "")


def three_steps(model, rank):
    for step in range(3):
        loss_of(model(floats(rank, step))).backward()


def other_shapes(model, rank):
    """Shapes and modes for which the compiler starts anew; gradients are dropped before."""
    for rows in (4, 7, 5):
        model.zero_grad()
        model.eval()
        with torch.no_grad():
            model(floats(rank, rows, rows + 1))
        model.train()
        loss_of(model(floats(rank, rows, rows))).backward()


def other_shapes_onto_gradients(model, rank):
    loss_of(model(floats(rank))).backward()
    loss_of(model(floats(rank, 2, rows=5))).backward()


def compiled(build, way, backend, first, combination):
    """A sharded model that is compiled before (`first`) or after it is wrapped."""
    strategy, transport = combination
    if first:
        return FSDP(way(make(build), backend), strategy=strategy, transport=transport)
    return way(wrapped(build, combination), backend)


def learn_when_compiled(build, run, way, backend, first, combination):
    """Gradients are the mean over ranks, to rounding."""
    expected = mean_grads(build, run)
    torch._dynamo.reset()
    model = compiled(build, way, backend, first, combination)
    run(model, dist.get_rank())
    ours = {plain_name(name): grad for name, grad in whole_grads(model).items()}
    ours = {name: near(grad, expected.get(name)) for name, grad in ours.items()}
    assert_same(ours, expected, "the gradients")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", [True, False], ids=["compiled, wrapped", "wrapped, compiled"])
@pytest.mark.parametrize(
    ("way", "backend"), [*((way, "aot_eager") for way in WAYS), (each_block_in_place, "eager")]
)
@each_combination
def test_gradients_of_a_compiled_model(pool2, way, first, backend, combination):
    pool2.run(learn_when_compiled, Stack, three_steps, way, backend, first, combination)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [each_block_in_place, the_whole_by_another_module])
@each_combination
def test_gradients_when_shapes_and_modes_change(pool2, way, combination):
    pool2.run(learn_when_compiled, Stack, other_shapes, way, "aot_eager", True, combination)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [each_block_in_place, the_whole_by_another_module])
@each_combination
def test_gradients_when_shapes_change_between_accumulations(pool2, way, combination):
    run = other_shapes_onto_gradients
    pool2.run(learn_when_compiled, Stack, run, way, "aot_eager", True, combination)


# --- models with something special inside -----------------------------------------------------------


class Recomputing(Stack):
    """Blocks that are recomputed in backward."""

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Tied(nn.Module):
    """One weight in two units' ways, so that it lies in the root."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in "ab")
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        x = F.linear(x, self.weight)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.weight)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", [True, False], ids=["compiled, wrapped", "wrapped, compiled"])
@pytest.mark.parametrize("way", [each_block_in_place, the_whole_in_place])
@pytest.mark.parametrize("build", [Recomputing, Tied])
@each_combination
def test_gradients_of_compiled_checkpointed_and_tied_models(pool2, build, way, first, combination):
    pool2.run(learn_when_compiled, build, three_steps, way, "aot_eager", first, combination)


# --- training --------------------------------------------------------------------------------------


# --- a limit -----------------------------------------------------------------------------------------


class OwnParameter(nn.Parameter):
    """A class of the script's own, which zshard leaves as it is."""


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = OwnParameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return x @ self.weight


@on_ranks(2)
def test_parameters_of_an_own_class_need_zero_grad_first():
    torch._dynamo.reset()
    model = FSDP(nn.Sequential(Own(), Own()), auto_wrap_policy={Own})
    for block in model:
        block.compile(backend="eager", dynamic=False)
    for rows in (4, 5):
        model.zero_grad()
        loss_of(model(floats(dist.get_rank(), rows=rows))).backward()
    said = message_of(lambda: model(floats(0, rows=6)))
    assert "attempting to assign a gradient" in said


# --- gradients that are there when the compiler starts anew ---------------------------------------

STRATEGIES = ("full_shard", "shard_grad_op", "zero1", "no_shard")
BF16 = MixedPrecision(param_dtype=torch.bfloat16)
LENGTHS = ((4, 6), (5, 9))  # of the micro-batches of each step


class Counting:
    """A backend that counts what it compiles."""

    def __init__(self):
        self.compiled = 0

    def __call__(self, graph, inputs):
        self.compiled += 1
        return graph


def no_sync_but_last(model, last):
    return contextlib.nullcontext() if last else model.no_sync()


def ordinary_loop(model, parameters, held=False):
    """Accumulation over other lengths, a step, an evaluation: losses and outputs."""
    optimizer = torch.optim.SGD(parameters, 0.05, momentum=0.9)
    rank, seen = dist.get_rank(), []
    for step, lengths in enumerate(LENGTHS):
        optimizer.zero_grad()
        for rows in lengths:
            with no_sync_but_last(model, rows == lengths[-1] or not held):
                loss = loss_of(model(floats(rank, step, rows)))
                loss.backward()
            seen.append(loss.item())
        optimizer.step()
        model.eval()
        with torch.no_grad():
            seen.append(model(floats(rank, step, rows=3 + step)).sum().item())
        model.train()
    return seen


def compiled_loop(strategy, transport, dynamic, precision=None):
    """The loop without a compiler, and with; how many graphs that compiled."""
    torch._dynamo.reset()
    found = []
    for backend in (None, Counting()):
        model = wrapped(Stack, (strategy, transport), mixed_precision=precision)
        for block in model.blocks if backend else ():
            block.compile(backend=backend, fullgraph=True, dynamic=dynamic)
        found.append(ordinary_loop(model, model.parameters(), held=dynamic is True))
    return *found, backend.compiled


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_loop_compiles(pool2, strategy, transport, dynamic):
    for eager, compiled, graphs in pool2.run(compiled_loop, strategy, transport, dynamic):
        assert compiled == pytest.approx(eager, rel=1e-6)
        assert graphs >= 2, "for training, and for evaluation"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_training_loop_compiles_in_bf16(pool2, transport):
    for eager, compiled, graphs in pool2.run(compiled_loop, "full_shard", transport, None, BF16):
        assert compiled == pytest.approx(eager, rel=1e-6)
        assert graphs >= 2


@on_ranks(2)
def test_optimizer_in_backward_of_compiled_blocks():
    """Losses of models made by fully_shard whose optimizer steps in backward, with other lengths."""
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        model = make(Stack)
        for module in (*model.blocks, model):
            fully_shard(module)
        optimizer = zshard.AdamW(model.parameters(), 0.01)
        model.optimizer_in_backward(optimizer)
        for block in model.blocks if compiled else ():
            block.compile(backend="aot_eager", fullgraph=True)
        losses = []
        for step in range(3):
            loss = loss_of(model(floats(dist.get_rank(), step, rows=3 + step)))
            loss.backward()
            losses.append(loss.item())
        found.append(losses)
    eager, compiled = found
    assert compiled == pytest.approx(eager, rel=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_only_the_compiler_sees_grad_as_none(transport):
    """Whether there is a gradient for eager code in forward, and for the compiler."""
    torch._dynamo.reset()
    model = wrapped(Stack, ("full_shard", transport))
    weight = model.blocks[0].up.weight
    loss_of(model(floats(0))).backward()
    eager, tracing, threads = [], [], []

    def backend(graph, inputs):
        tracing.append(weight.grad is not None)
        asking = threading.Thread(target=lambda: threads.append(weight.grad is not None))
        asking.start()
        asking.join()
        raise RuntimeError("no such backend")

    model.blocks[0].register_forward_pre_hook(lambda *_: eager.append(weight.grad is not None))
    model.blocks[0].down.register_forward_hook(lambda *_: eager.append(weight.grad is not None))
    compiled = torch.compile(model.blocks[0].up.forward, backend=backend)
    model.blocks[0].up.forward = compiled
    for _ in range(2):
        with pytest.raises(Exception, match="no such backend"):
            model(floats(0))
        eager.append(weight.grad is not None)
    del model.blocks[0].up.forward
    loss_of(model(floats(0))).backward()
    assert set(eager) == {True}
    assert set(tracing) == {False}
    assert set(threads) == {True}


@on_ranks(2)
def test_compiled_autograd_is_refused_with_a_remedy():
    """The remedy in the error: the model is compiled, and backward() runs outside of it."""
    transport = "shm"
    torch._dynamo.reset()
    model = wrapped(Stack, ("full_shard", transport))
    loss = loss_of(model(floats(0)))
    enabled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    with enabled, pytest.raises(NotImplementedError, match=r"torch\.compile\(model\)"):
        loss.backward()
    loss_of(torch.compile(model, backend="eager")(floats(0))).backward()
    expected = mean_grads(Stack, lambda plain, _: loss_of(plain(floats(0))).backward())
    assert_same(whole_grads(model), expected, "the gradients")


# --- a model of many classes ----------------------------------------------------------------------


def block_of_its_own_class(number):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.layer(x))

    # Each class has code of its own, as written classes do: torch limits what it compiles of one.
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
