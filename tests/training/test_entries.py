"""Backward unshards a unit wherever its graph enters what the unit's forward recorded.

An output may leave a forward in any way, or be kept beside it: gradients are bit-identical to the
plain model's.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import COMBINATIONS, Block, loss_of, make, wrapped
from scenarios import WIDTH, check_mean_grads, floats, mean_grads, whole_grads, wrong_grads
from spawn import on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zshard import FSDP

# --- ways for a result to leave a forward other than its return value -------------------------------


class Slotted:
    """An object without a __dict__."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Way(NamedTuple):
    """How a block passes its result, and how the model gets it."""

    give: Callable[[nn.Module, Tensor, list[Any]], Any]
    take: Callable[[nn.Module, Any, list[Any]], Tensor]


def _into_box(module: nn.Module, y: Tensor, box: list[Any]) -> None:
    box.append(y)


def _onto_module(module: nn.Module, y: Tensor, box: list[Any]) -> Tensor:
    module.kept = y  # type: ignore[assignment]
    return y.detach()


def _deep(module: nn.Module, y: Tensor, box: list[Any]) -> list[Any]:
    found: list[Any] = [y]
    for _ in range(12):
        found = [found]
    return found


def _from_deep(module: nn.Module, out: Any, box: list[Any]) -> Any:
    while isinstance(out, list):
        out = out[0]
    return out


def _written_view(module: nn.Module, out: Any, box: list[Any]) -> Tensor:
    out[0].add_(out[0] * 0.5)
    return out[0]


WAYS = {
    "a tensor": Way(lambda m, y, box: y, lambda m, out, box: out),
    "a tuple": Way(lambda m, y, box: (y, y.mean()), lambda m, out, box: out[0] + out[1]),
    "a dict": Way(lambda m, y, box: {"y": [y]}, lambda m, out, box: out["y"][0]),
    "an argument": Way(_into_box, lambda m, out, box: box[0]),
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

    def forward(self, x: Tensor, box: list[Any] | None = None) -> Any:
        return WAYS[self.way].give(self, super().forward(x), box if box is not None else [])


class Taking(nn.Module):
    """Blocks, one after the other. run: "eager", or checkpointed ("reentrant", "non-reentrant")."""

    def __init__(self, way: str, run: str = "eager") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Giving(WIDTH) for _ in range(3))
        for block in self.blocks:
            block.way = way  # type: ignore[assignment]
        self.head = nn.Linear(WIDTH, 2)
        self.way, self.run = way, run

    def _block(self, block: nn.Module, x: Tensor) -> Tensor:
        box: list[Any] = []
        return WAYS[self.way].take(block, block(x, box), box)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.run == "eager":
                x = self._block(block, x)
            else:
                reentrant = self.run == "reentrant"
                x = checkpoint(self._block, block, x, use_reentrant=reentrant)
        return self.head(x)  # type: ignore[no-any-return]


def learn(model: nn.Module, x: Tensor) -> None:
    """A forward and a backward."""
    loss_of(model(x.requires_grad_())).backward()


# --- each way, learned -------------------------------------------------------------------------------

HYBRID = [("hybrid_shard", "c10d"), ("hybrid_full", "c10d")]
POLICIES = {"one unit": None, "nested": {Giving, Block}}


def learn_by_way(way, how, combination, policy):
    """Gradients of the second of two steps are the mean over ranks."""

    def build():
        return Taking(way, how)

    def run(model, rank):
        learn(model, floats(rank))

    model = wrapped(build, combination, auto_wrap_policy=policy)
    for _ in range(2):
        model.zero_grad()
        run(model, dist.get_rank())
    assert_same(whole_grads(model), mean_grads(build, run), "the gradients")


@pytest.mark.sampled(14)
@pytest.mark.parametrize("combination", [*COMBINATIONS, *HYBRID])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", ["eager", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("way", WAYS)
def test_backward_from_any_kind_of_output(pool2, way, how, policy, combination):
    if how == "reentrant" and way == "the module":
        pytest.skip("a reentrant checkpoint runs its forward without a graph")
    pool2.run(learn_by_way, way, how, combination, POLICIES[policy])


# --- results that are kept beside the output ------------------------------------------------------


class Kept(nn.Module):
    """Keeps what each block has made, which no other block sees. `leaks`: the output does not
    depend on the blocks."""

    def __init__(self, leaks=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)
        self.leaks = leaks
        self.kept = []

    def forward(self, x):
        self.kept = []
        for block in self.blocks:
            self.kept.append(block.up(block(x)))
            x = x * 2 if self.leaks else block(x)
        return self.head(x)


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


def build_kept():
    return Kept()


def build_leaking():
    return Kept(leaks=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("combination", [("full_shard", "shm"), ("full_shard", "c10d")])
@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("a closure", "a generator")])
@on_ranks(2)
def test_backward_from_outputs_of_compiled_blocks(way, combination):
    """As learn_by_way with compiled blocks, to rounding."""
    torch._dynamo.reset()
    model = wrapped(lambda: Taking(way), combination, auto_wrap_policy={Giving})
    for block in model.module.blocks:
        block.compile(backend="aot_eager")
    rank = dist.get_rank()
    for _ in range(2):
        model.zero_grad()
        learn(model, floats(rank))
    expected = mean_grads(lambda: Taking(way), lambda model, rank: learn(model, floats(rank)))
    ours = whole_grads(model)
    assert [
        name
        for name, grad in expected.items()
        if not torch.allclose(ours[name], grad, rtol=1e-5, atol=1e-6)
    ] == []


@pytest.mark.sampled(6)
@pytest.mark.parametrize("combination", [*COMBINATIONS, *HYBRID])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("build", [build_kept, build_leaking])
def test_backward_from_kept_intermediates(pool2, build, run, policy, combination):
    exact = run is not kept_before_the_output  # its two backwards are reduced one by one
    pool2.run(check_mean_grads, build, run, exact, [combination], POLICIES[policy])


# --- what a forward leaves behind -----------------------------------------------------------------


def backward_after_many_forwards(combination):
    """The graph is older than 20,000 forwards of units."""
    build = lambda: nn.Sequential(Block(WIDTH), Block(WIDTH))  # noqa: E731
    model, rank = wrapped(build, combination, auto_wrap_policy={Block}), dist.get_rank()
    loss = loss_of(model(floats(rank)))
    for _ in range(6_700):
        model(floats(rank, rows=1))
    loss.backward()
    expected = mean_grads(build, lambda model, rank: loss_of(model(floats(rank))).backward())
    assert_same(whole_grads(model), expected, "the gradients")


@pytest.mark.thorough
def test_backward_of_a_very_old_graph(pool2):
    """It gathers more than needed; its gradients are right."""
    pool2.run(backward_after_many_forwards, ("full_shard", "shm"))


@pytest.mark.parametrize("combination", [("full_shard", "shm"), ("full_shard", "c10d")])
@on_ranks(2)
def test_forward_in_another_thread(combination):
    """The forward runs in another thread than the backward."""
    import threading

    build = lambda: nn.Sequential(Block(WIDTH), Block(WIDTH))  # noqa: E731
    model, rank = wrapped(build, combination, auto_wrap_policy={Block}), dist.get_rank()
    losses = []
    thread = threading.Thread(target=lambda: losses.append(loss_of(model(floats(rank)))))
    thread.start()
    thread.join()
    losses[0].backward()
    expected = mean_grads(build, lambda model, rank: loss_of(model(floats(rank))).backward())
    assert_same(whole_grads(model), expected, "the gradients")


def square_sum(model):
    return sum(p.square().sum() for p in model.parameters())


@pytest.mark.parametrize("combination", [("full_shard", "shm"), ("full_shard", "c10d")])
@on_ranks(2)
def test_penalty_computed_in_summon_full_params(combination):
    """A term computed within summon_full_params(), with its backward outside."""
    model = wrapped(build_kept, combination, auto_wrap_policy={Block})
    with model.summon_full_params(model):
        penalty = square_sum(model)
    penalty.backward()
    expected = mean_grads(build_kept, lambda model, rank: square_sum(model).backward())
    assert_same(whole_grads(model), expected, "the gradients")


@torch.jit.script
def backward_in_cpp(loss: torch.Tensor):
    loss.backward()


def started_in_cpp(transport):
    """(message, wrong gradients) of a backward that C++ starts; the wrong ones of the next backward."""
    model = wrapped(build_kept, ("full_shard", transport), auto_wrap_policy={Block})

    def run(model, rank):
        loss_of(model(floats(rank))).backward()

    try:
        backward_in_cpp(loss_of(model(floats(dist.get_rank()))))
        message = ""
    except RuntimeError as error:
        message = str(error)
    first = [] if message else wrong_grads(whole_grads(model), mean_grads(build_kept, run))
    model.zero_grad()
    both(model, dist.get_rank())
    return message, first, wrong_grads(whole_grads(model), mean_grads(build_kept, both))


@pytest.mark.parametrize(("transport", "words"), [("shm", "sharded"), ("c10d", "")])
def test_backward_started_in_cpp_is_right_or_an_error(pool2, transport, words):
    """Over c10d the outermost unit stays gathered, so its hooks open the backward."""
    for message, first, second in pool2.run(started_in_cpp, transport):
        assert words in message
        assert bool(message) == bool(words)
        assert first == second == []


@pytest.mark.parametrize("combination", [("full_shard", "shm"), ("full_shard", "c10d")])
@on_ranks(2)
def test_two_models_in_one_graph(combination):
    """Two models in one graph, one fed by the other."""
    plain = [
        make(lambda: nn.Sequential(Block(WIDTH))),
        make(lambda: nn.Sequential(Block(WIDTH)), 2),
    ]
    strategy, transport = combination
    ours = [FSDP(copy.deepcopy(p), strategy=strategy, transport=transport) for p in plain]

    def grads(first, second):
        loss_of(second(first(floats(0)))).backward()

    grads(*ours)
    grads(*plain)
    for sharded, whole in zip(ours, plain, strict=True):
        expected = {name: p.grad for name, p in whole.named_parameters()}
        assert_same(whole_grads(sharded), expected, "the gradients")


# --- parameters that a backward reads ---------------------------------------------------------------


class Reversible(torch.autograd.Function):
    """Recomputes its inputs in backward; the gradients of its layers come from a backward within."""

    @staticmethod
    def forward(ctx: Any, block: Any, x: Tensor, y: Tensor, *_: Tensor) -> Any:
        with torch.no_grad():
            x = x + block.f(y)
            y = y + block.g(x)
        ctx.block, ctx.n = block, len(_)
        ctx.save_for_backward(x, y)
        return x, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, y = ctx.saved_tensors
        block = ctx.block
        with torch.no_grad():
            y = y - block.g(x)
            x = x - block.f(y)
        with torch.enable_grad():
            x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
            first = x + block.f(y)
            torch.autograd.backward((first, y + block.g(first)), grads)
        return None, x.grad, y.grad, *(None for _ in range(ctx.n))


class Reads(nn.Module):
    """A hook in the forward's graph reads a parameter of a unit that it has not called."""

    def __init__(self, reversible: bool) -> None:
        super().__init__()
        self.f, self.g, self.other = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.reversible = reversible

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        if self.reversible:
            params = (*self.f.parameters(), *self.g.parameters())
            return torch.cat(Reversible.apply(self, x, x + 1, *params), -1)  # type: ignore[no-untyped-call]
        x.register_hook(
            lambda g: (g * self.other.weight.square().sum()) @ self.other.weight.detach()
        )
        return self.g(torch.tanh(self.f(x)))


def check_reads(reversible: bool, strategy: str, transport: str) -> None:
    plain = make(lambda: Reads(reversible))
    model = FSDP(
        copy.deepcopy(plain), strategy=strategy, transport=transport, auto_wrap_policy={nn.Linear}
    )
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), 0.01)
        for _ in range(2):
            optimizer.zero_grad()
            each(torch.ones(2, WIDTH)).square().mean().backward()
            optimizer.step()
    assert_same(model.state_dict(), plain.state_dict(), "the state")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("reversible", [True, False], ids=["reversible", "hook"])
def test_backward_reads_parameters(pool2, reversible, combination):
    pool2.run(check_reads, reversible, *combination)
