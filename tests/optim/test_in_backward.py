"""optimizer_in_backward(): bit-identical to step() after backward, with one unit's gradients at a
time, for every model, strategy and way of calling it."""

import functools
import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import CASES, COMBINATIONS, TRANSPORTS, Block, Case, loss_of, make_optimizer
from recomputed import KINDS, WAYS, Stack, around_parts_of_the_root
from recomputed import around_units_and_a_weight_of_the_root as around_units_and_a_weight
from scenario import Scenario
from scenarios import WIDTH, message_of
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP

ADAMW = "zshard.AdamW"
SHARDED = [each for each in COMBINATIONS if each[0] != "no_shard"]
# With reentrant checkpoints: a weight of the root is used again after its apparent last gradient.
OF_THE_ROOT = (around_units_and_a_weight, around_parts_of_the_root)
EACH_COMBINATION = pytest.mark.parametrize("combination", COMBINATIONS)


def in_backward(kind):
    """Return a function that makes a model's optimizer, which steps in backward."""

    def new_optimizer(model):
        optimizer = kind(model) if callable(kind) else make_optimizer(kind, model)
        model.optimizer_in_backward(optimizer)
        return optimizer

    return new_optimizer


def same_in_backward(model, way, run=lambda training: training.go(), kind=ADAMW, **changes):
    """Fail unless steps in backward change no bit and leave no .grad; return both trainings."""
    scenario = Scenario(model, way, kind, **changes)
    usual, ours = scenario.sharded(), scenario.but(optimizer=in_backward(kind)).sharded()
    for training in (usual, ours):
        run(training)
    assert_same(ours.state(), usual.state(), f"after steps in backward, {way}:")
    assert [name for name, p in ours.module.named_parameters() if p.grad is not None] == []
    return usual, ours


def backward(training, scale=1.0):
    """A backward alone, of the next batch."""
    batch = training.scenario.case.batch(len(training.losses), training.rank)
    loss = loss_of(training.model(batch)) * scale
    loss.backward()
    training.losses.append(loss.item())


def step_after(training):
    """Do a loop's work after backward; with steps in backward, no step is left."""
    training.optimizer.step()
    training.optimizer.zero_grad()


# --- bit-identical to step() after backward -------------------------------------------------------


@pytest.mark.sampled(3)
@EACH_COMBINATION
@pytest.mark.parametrize("kind", [ADAMW, "zshard.SGD"])
@pytest.mark.parametrize("name", CASES)
@on_ranks(2, 3)
def test_every_model_strategy_and_transport(name, kind, combination):
    same_in_backward(name, combination, kind=kind)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2"])
@on_ranks(4)
def test_hybrid(strategy, transport):
    same_in_backward("net", (strategy, 2, 2), options={"transport": transport})


def leaf(generator):
    """An input that requires a gradient: reentrant checkpoints need one."""
    return torch.randn(4, WIDTH, generator=generator).requires_grad_()


@pytest.mark.sampled(2)
@KINDS
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@on_ranks(2)
def test_every_way_of_checkpointing(way, reentrant):
    case = Case(functools.partial(Stack, way, reentrant), leaf)
    if reentrant and way in OF_THE_ROOT:
        model = Scenario(case, optimizer=in_backward(ADAMW)).sharded()
        said = message_of(lambda: backward(model), RuntimeError)
        assert "unit '(root)' again after" in said or "got a shard of 'shift'" in said
        return
    for combination in COMBINATIONS:
        same_in_backward(case, combination)


class Passing(nn.Module):
    """As T5 does: a tensor that the first block creates passes through all, and out of each."""

    class Part(Block):
        def forward(self, x, bias):
            return super().forward(x) + bias, bias

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Passing.Part(WIDTH) for _ in range(4))

    def forward(self, x):
        bias = self.first(x)
        for block in self.blocks:
            x, bias = block(x, bias)
        return x * bias


class Repeated(nn.Module):
    """Blocks that are called twice, and one that every second batch skips."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        for block in [*self.blocks, *self.blocks][self.calls % 2 :]:
            x = block(x)
        return x


def more_forwards(by_turns, training):
    """Evaluations (`by_turns`: on one rank), dropped graphs, two losses for one backward."""
    for step in range(4):
        if training.rank == step % 2 or not by_turns:
            with torch.no_grad():
                training.model(training.scenario.case.batch(step, training.rank))
        batches = [
            training.scenario.case.batch(step + 10 * i, training.rank) for i in range(1 + step % 2)
        ]
        losses = [loss_of(training.model(batch)) for batch in batches]
        training.model(batches[0])
        sum(losses).backward()
        step_after(training)


@pytest.mark.sampled(2)
@EACH_COMBINATION
@pytest.mark.parametrize("build", [Passing, Repeated, CASES["frozen"].make])
@on_ranks(2)
def test_modules_not_called_exactly_once(build, combination):
    case = Case(build, leaf)
    same_in_backward(case, combination)
    same_in_backward(case, combination, functools.partial(more_forwards, False))
    if combination[1] == "shm":
        same_in_backward(case, combination, functools.partial(more_forwards, True))


@EACH_COMBINATION
@on_ranks(1, 2)
def test_accumulation_in_no_sync_is_one_step(combination):
    same_in_backward("mlp", combination, micro_batches=3)
    training = Scenario("mlp", combination, in_backward(ADAMW)).sharded()
    before = training.state()["model"]
    with training.no_sync():
        backward(training)
    assert all(p.grad is not None for p in training.model.parameters())
    assert_same(training.state()["model"], before, "the model within no_sync()")
    backward(training)
    assert all(p.grad is None for p in training.model.parameters())


@EACH_COMBINATION
@on_ranks(1, 2)
def test_lower_precision(combination):
    """Half-precision compute over fp32 shards, and bf16 parameters rounded stochastically."""
    policy = zshard.MixedPrecision(param_dtype=torch.bfloat16)
    same_in_backward("net", combination, options={"mixed_precision": policy})
    net = CASES["net"]
    case = Case(lambda: net.make().to(torch.bfloat16), net.draw, net.policy)
    rounded = functools.partial(zshard.AdamW, lr=1e-2, stochastic_rounding=True)
    trainings = same_in_backward(case, combination, kind=lambda model: rounded(model.parameters()))
    steps = [each.optimizer.param_groups[0]["rounding_step"] for each in trainings]
    assert steps == [3, 3]


# --- schedulers, several optimizers, hooks, handles -----------------------------------------------


def scheduled(call_step, training):
    optimizer = training.optimizer
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    is_early = training.model in zshard.optim.in_backward._handles
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            backward(training)
            if call_step or not is_early:
                step_after(training)
            schedule.step()


@pytest.mark.parametrize("call_step", [True, False])
@on_ranks(2)
def test_schedulers_advance_with_and_without_step_calls(call_step):
    same_in_backward("mlp", ("full_shard", "shm"), functools.partial(scheduled, call_step))


def clamped(training):
    """Users' hooks see the reduced gradient once, and the step uses their changes."""
    calls = []

    def clamp(param):
        calls.append(param)
        param.grad.clamp_(-1e-3, 1e-3)

    handles = [p.register_post_accumulate_grad_hook(clamp) for p in training.model.parameters()]
    training.go()
    assert len(calls) == 3 * len(handles)


@EACH_COMBINATION
@on_ranks(2)
def test_users_hooks_run_before_the_step(combination):
    same_in_backward("mlp", combination, clamped)


@EACH_COMBINATION
@pytest.mark.parametrize("split", [True, False])
@on_ranks(2)
def test_two_optimizers(combination, split):
    """Over parameters of the same units; split: only one of them steps in backward."""
    states = []
    for is_early in (False, True):
        training = Scenario("net", combination).sharded()
        params = list(training.model.parameters())
        a = zshard.AdamW(params[::2], 1e-2)
        b = zshard.SGD([{"params": params[1::4]}, {"params": params[3::4], "lr": 1e-3}], 0.1, 0.9)
        if is_early:
            training.model.optimizer_in_backward(*([a] if split else [a, b]))
        for _ in range(3):
            backward(training)
            left = [split and i % 2 == 1 if is_early else True for i in range(len(params))]
            assert [p.grad is not None for p in params] == left
            for training.optimizer in (a, b):
                step_after(training)
        states.append(training.state())
    assert_same(*states, "the training")


@pytest.mark.parametrize("handles", [1, 2])
@on_ranks(2)
def test_a_backward_is_one_step_of_rounding_for_each_optimizer(handles):
    states = []
    for is_early in (False, True):
        torch.manual_seed(0)
        model = FSDP(nn.Sequential(FSDP(nn.Linear(64, 64)), FSDP(nn.Linear(64, 64))))
        optimizer = zshard.AdamW8bit(model.parameters(), lr=0.1, min_8bit_size=0)
        for part in () if not is_early else [model] if handles == 1 else model:
            part.optimizer_in_backward(optimizer)
        for step in range(3):
            loss_of(model(torch.full((4, 64), 1.0 + step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append([model.state_dict(), optimizer.state_dict()["state"]])
        assert optimizer.param_groups[0]["rounding_step"] == 3
    assert_same(*states, "model and state")


@EACH_COMBINATION
@on_ranks(1, 2)
def test_removed_handle_leaves_the_model_unchanged(combination):
    """Two steps in backward, remove() and two usual steps; memory as before."""
    states, memories = [], []
    for is_early in (False, True):
        training = Scenario("mlp", combination, ADAMW).sharded()
        model = training.model
        handle = model.optimizer_in_backward(training.optimizer) if is_early else None
        for step in range(4):
            if step == 2 and is_early:
                handle.remove()
                handle.remove()
                hooks = [m._forward_hooks or m._forward_pre_hooks for m in model.modules()]
                assert dist.get_world_size() > 1 or not any(hooks)  # alone, it had hooked units
            backward(training)
            has_grads = [p.grad is not None for p in model.parameters()]
            assert all(has_grads) if step >= 2 or not is_early else not any(has_grads)
            memory = model.memory()
            step_after(training)
        states.append(training.state())
        memories.append(memory["grads"] + memory["buckets"])  # where no_shard has them
    assert_same(*states, "the training")
    assert memories[0] == memories[1]


def used_and_dropped(combination):
    training = Scenario("mlp", combination, in_backward(ADAMW)).sharded()
    backward(training)
    held = training.model, training.optimizer, next(training.model.parameters())
    return [weakref.ref(each) for each in held]


@EACH_COMBINATION
@on_ranks(1, 2)
def test_dropped_model_and_optimizer_are_freed_without_gc(combination):
    used_and_dropped(combination)  # torch's first optimizer leaves a cycle
    gc.collect()
    gc.disable()
    try:
        assert [reference() for reference in used_and_dropped(combination)] == [None] * 3
    finally:
        gc.enable()


# --- memory ---------------------------------------------------------------------------------------

DEEP = Case(
    lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)]),
    lambda generator: torch.randn(4, 64, generator=generator),
    {nn.Linear},
)


def watched(combination, kind):
    """Return (parameters with a .grad, memory) before each step of a parameter, the model's memory
    at the end, and its units' bytes."""
    training = Scenario(DEEP, combination, kind).sharded()
    model, seen = training.model, []

    def look(_):
        seen.append((sum(p.grad is not None for p in model.parameters()), model.memory()))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(look)
    training.go()
    units = [module._zshard_state.unit.bytes for module in FSDP.fsdp_modules(model)]
    return seen, model, units


@EACH_COMBINATION
@on_ranks(2)
def test_gradients_of_one_unit_at_a_time(combination):
    most, usual, units = watched(combination, ADAMW)
    seen, model, _ = watched(combination, in_backward(ADAMW))
    assert len(seen) == len(most) == 3 * 24
    assert max(held for held, _ in most) == 24
    assert max(held for held, _ in seen) <= 3  # autograd holds one, of the next unit
    before, page = usual.memory("peak"), 4096
    largest = -(-max(unit["grad"] for unit in units) // page) * page
    assert before["grads"] >= 11 * max(unit["grad"] for unit in units)
    for memory in [memory for _, memory in seen] + [model.memory("now")]:
        assert memory["grads"] == 0
        assert memory["slots"] - before["slots"] <= largest
        assert memory["buckets"] <= before["buckets"]


@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("combination", SHARDED)
@on_ranks(2)
def test_unit_called_twice_is_stepped_at_the_end(combination, forwards):
    """The last block is stepped before backward reaches the first if it was called once."""
    model = Scenario(DEEP, combination, in_backward("zshard.SGD")).sharded().model
    last, seen = model[-1].weight, []
    *_, loss = [loss_of(model(torch.randn(4, 64))) for _ in range(forwards)]
    before = last._version
    model[0].weight.register_hook(lambda _: seen.append(last._version > before))
    loss.backward()
    assert last._version > before
    assert seen == [forwards == 1]
