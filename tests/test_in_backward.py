"""optimizer_in_backward(): the bits of step() after backward, one unit's gradients at a time.

The one idea: the yardstick is the same model, strategy and optimizer with a step() after backward.
"""

from __future__ import annotations

import copy
import functools
import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from models import CASES, COMBINATIONS, TRANSPORTS, Block, loss_of, make, make_optimizer, wrapped
from models import differences as differences_of
from scenarios import WIDTH, floats, message_of
from scenarios import Stack as Blocks
from spawn import ranks
from test_checkpointing import (
    KINDS,
    WAYS,
    Stack,
    around_parts_of_the_root,
    around_units_and_a_weight_of_the_root,
    leaf,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import zshard
from zshard import FSDP

# With reentrant checkpoints: a weight of the root is used again after its last gradient seemed there.
OF_THE_ROOT = (around_units_and_a_weight_of_the_root, around_parts_of_the_root)
SHARDED = [c for c in COMBINATIONS if c[0] != "no_shard"]
ADAMW = "zshard.AdamW"


def differences(run, build, combination, optimizer=ADAMW, **options):
    """What differs between a model that run(model, optimizer) trains with steps in backward, and
    one that steps after it: names of parameters, and those that kept a .grad."""
    states = []
    for in_backward in (False, True):
        model = wrapped(build, combination, **options)
        made = make_optimizer(optimizer, model)
        if in_backward:
            model.optimizer_in_backward(made)
        run(model, made)
        states.append(model.state_dict())
    kept = [name for name, param in model.named_parameters() if param.grad is not None]
    return differences_of(*states) + [f"{name} has a .grad" for name in kept]


def wrong(run, build, combinations=COMBINATIONS, optimizer=ADAMW, **options):
    """{combination: differences}, where there are any."""
    found = {c: differences(run, build, c, optimizer, **options) for c in combinations}
    return {c: names for c, names in found.items() if names}


def step_after(model, optimizer):
    """What a loop does after backward; with steps in backward there is nothing left to step."""
    optimizer.step()
    optimizer.zero_grad()


# --- the bits of step() after backward --------------------------------------------------------------


def train_case(name, model, optimizer):
    case = CASES[name]
    for step in range(4):
        loss_of(model(case.batch(step, dist.get_rank()))).backward()
        step_after(model, optimizer)


def wrong_in_cases(names, optimizer):
    found = {}
    for name in names:
        run = functools.partial(train_case, name)
        policy = {"auto_wrap_policy": CASES[name].policy}
        found[name] = wrong(run, CASES[name].make, optimizer=optimizer, **policy)
    return {name: bad for name, bad in found.items() if bad}


@ranks(2, 3)
@pytest.mark.parametrize("optimizer", [ADAMW, "zshard.SGD"])
def test_every_model_strategy_and_transport(pool, optimizer):
    assert pool.run(wrong_in_cases, list(CASES), optimizer) == [{}] * pool.world


def wrong_on_a_mesh(transport):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    run = functools.partial(train_case, "net")
    combinations = [(strategy, transport) for strategy in ("hybrid_shard", "hybrid_shard_zero2")]
    return wrong(run, CASES["net"].make, combinations, device_mesh=mesh)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_hybrid(pool4, transport):
    assert pool4.run(wrong_on_a_mesh, transport) == [{}] * 4


def three_steps(model, optimizer):
    for step in range(3):
        loss_of(model(leaf(dist.get_rank(), step))).backward()
        step_after(model, optimizer)


@KINDS
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_way_of_checkpointing(pool2, way, reentrant):
    if reentrant and way in OF_THE_ROOT:
        pytest.skip("an error: see test_a_weight_that_is_recomputed_after_its_step")
    build = functools.partial(Stack, way, reentrant)
    assert pool2.run(wrong, three_steps, build) == [{}, {}]


def recomputed_after_its_step(way):
    model = wrapped(functools.partial(Stack, way, True), ("full_shard", "shm"))
    model.optimizer_in_backward(make_optimizer(ADAMW, model))
    return message_of(lambda: loss_of(model(leaf(dist.get_rank()))).backward(), RuntimeError)


@pytest.mark.parametrize("way", OF_THE_ROOT)
def test_a_weight_that_is_recomputed_after_its_step(pool2, way):
    said = pool2.run(recomputed_after_its_step, way)
    assert any("unit '' are wanted again in a backward" in message for message in said), said


class Passing(nn.Module):
    """What T5 does: a tensor that the first block makes goes through all, out of each as well."""

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
    """Blocks that are called twice, and one that every second batch leaves out."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        for block in [*self.blocks, *self.blocks][self.calls % 2 :]:
            x = block(x)
        return x


def more_forwards(by_turns, model, optimizer):
    """Evaluations (`by_turns`: on one rank), graphs that are dropped, two losses for a backward."""
    rank = dist.get_rank()
    for step in range(4):
        if rank == step % 2 or not by_turns:
            with torch.no_grad():
                model(floats(rank, step))
        losses = [loss_of(model(floats(rank, step + 10 * i))) for i in range(1 + step % 2)]
        model(floats(rank, step))
        sum(losses).backward()
        step_after(model, optimizer)


@pytest.mark.parametrize("build", [Passing, Repeated, Blocks])
def test_modules_called_otherwise_than_once(pool2, build):
    if build is not Blocks:
        assert pool2.run(wrong, three_steps, build) == [{}, {}]
    assert pool2.run(wrong, functools.partial(more_forwards, False), build) == [{}, {}]
    by_turns = functools.partial(more_forwards, True)
    shm = [combination for combination in COMBINATIONS if combination[1] == "shm"]
    assert pool2.run(wrong, by_turns, build, shm) == [{}, {}]


def accumulating(synced, model, optimizer):
    """Three batches to a step, the first two in no_sync() unless `synced`."""
    for step in range(6):
        last = step % 3 == 2
        model.set_requires_gradient_sync(last)
        loss_of(model(floats(dist.get_rank(), step))).backward()
        if last:
            step_after(model, optimizer)


def grads_while_accumulating(combination):
    """Parameters with a .grad: in no_sync(), and after the synced backward."""
    model = wrapped(Blocks, combination)
    model.optimizer_in_backward(zshard.AdamW(model.parameters()))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    counts = []
    with model.no_sync():
        loss_of(model(floats(dist.get_rank()))).backward()
    counts.append(sum(p.grad is not None for p in model.parameters()))
    same = differences_of(model.state_dict(), before) == []
    loss_of(model(floats(dist.get_rank(), 1))).backward()
    counts.append(sum(p.grad is not None for p in model.parameters()))
    return counts, same, len(list(model.parameters()))


def test_accumulation_in_no_sync_is_one_step(pool2):
    run = functools.partial(accumulating, False)
    assert pool2.run(wrong, run, Blocks) == [{}, {}]
    for combination in COMBINATIONS:
        for counts, same, params in pool2.run(grads_while_accumulating, combination):
            assert (counts, same) == ([params, 0], True)


def mixed(combination):
    """Half-precision compute over fp32 shards, and bf16 parameters rounded stochastically."""
    run = functools.partial(train_case, "net")
    policy = zshard.MixedPrecision(param_dtype=torch.bfloat16)
    found = differences(run, CASES["net"].make, combination, mixed_precision=policy)
    states = []
    for in_backward in (False, True):
        model = wrapped(lambda: CASES["net"].make().to(torch.bfloat16), combination)
        optimizer = zshard.AdamW(model.parameters(), lr=1e-2, stochastic_rounding=True)
        if in_backward:
            model.optimizer_in_backward(optimizer)
        train_case("net", model, optimizer)
        states.append({**model.state_dict(), "step": optimizer.param_groups[0]["rounding_step"]})
    assert states[1]["step"] == 4
    return found + differences_of(*states)


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_lower_precision(pool2, combination):
    assert pool2.run(mixed, combination) == [[], []]


# --- memory -------------------------------------------------------------------------------------------


def deep():
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])


def watch(model):
    """A list that gets, before each step of a parameter: how many have a .grad, bytes of slots."""
    seen = []

    def look(_param):
        held = sum(p.grad is not None for p in model.parameters())
        seen.append((held, model.memory()))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(look)
    return seen


def held_in_backward(combination, in_backward, steps=3):
    model = wrapped(deep, combination, auto_wrap_policy={nn.Linear})
    optimizer = zshard.AdamW(model.parameters())
    if in_backward:
        model.optimizer_in_backward(optimizer)
    seen = watch(model)
    for _ in range(steps):
        loss_of(model(torch.randn(4, 64))).backward()
        step_after(model, optimizer)
    return seen, model.memory(), [m._zshard_state.unit.bytes for m in FSDP.fsdp_modules(model)]


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_gradients_of_one_unit_at_a_time(pool2, combination):
    usual = pool2.run(held_in_backward, combination, False)
    for (seen, end, _), (most, before, units) in zip(
        pool2.run(held_in_backward, combination, True), usual, strict=True
    ):
        assert len(seen) == len(most) == 3 * 24
        assert max(held for held, _ in most) == 24
        assert max(held for held, _ in seen) <= 3  # one is autograd's, of the unit after
        whole = before["grads"]
        page = 4096
        largest = -(-max(unit["grad"] for unit in units) // page) * page
        assert whole >= 11 * max(unit["grad"] for unit in units)
        for held in [memory for _, memory in seen] + [end]:
            assert held["grads"] == 0
            assert held["slots"] - before["slots"] <= largest
            assert held["buckets"] <= before["buckets"]


def order_of_steps(combination):
    """For each block from the last to the first: whether the last one had been stepped when its
    gradients were there."""
    model = wrapped(deep, combination, auto_wrap_policy={nn.Linear})
    optimizer = zshard.SGD(model.parameters(), 0.1)
    model.optimizer_in_backward(optimizer)
    last = model[-1].weight
    seen = []
    for layer in reversed(model):
        layer.weight.register_post_accumulate_grad_hook(
            lambda _: seen.append(last._version > before)
        )
    before = last._version
    loss_of(model(torch.randn(4, 64))).backward()
    assert last._version > before
    return seen


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_a_unit_is_stepped_while_backward_goes_on(pool2, combination):
    for seen in pool2.run(order_of_steps, combination):
        assert seen == [False] + [True] * 11


def stepped_within(combination, forwards):
    """Whether the last block has been stepped when backward reaches the first."""
    model = wrapped(deep, combination, auto_wrap_policy={nn.Linear})
    model.optimizer_in_backward(zshard.SGD(model.parameters(), 0.1))
    last, seen = model[-1].weight, []
    *_, loss = [loss_of(model(torch.randn(4, 64))) for _ in range(forwards)]
    before = last._version
    model[0].weight.register_hook(lambda _: seen.append(last._version > before))
    loss.backward()
    assert last._version > before
    return seen


@pytest.mark.parametrize("combination", SHARDED)
def test_a_unit_that_was_called_twice_is_stepped_at_the_end(pool2, combination):
    assert pool2.run(stepped_within, combination, 1) == [[True]] * 2
    assert pool2.run(stepped_within, combination, 2) == [[False]] * 2


# --- a world of one -------------------------------------------------------------------------------------


class Alone(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = deep()
        self.shift = nn.Parameter(torch.zeros(64))

    def forward(self, x):
        return self.layers(x) + self.shift


def alone(in_backward, optimizer=zshard.AdamW):
    torch.manual_seed(0)
    model = FSDP(Alone(), auto_wrap_policy={nn.Linear})
    made = optimizer(model.parameters(), 1e-2)
    handle = model.optimizer_in_backward(made) if in_backward else None
    return model, made, handle


def batch(step):
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("optimizer", [zshard.AdamW, zshard.Adam, zshard.SGD])
def test_alone(optimizer):
    states = []
    for in_backward in (False, True):
        model, made, _ = alone(in_backward, optimizer)
        counts = watch(model)
        for step in range(3):
            with model.no_sync():
                loss_of(model(batch(10 + step))).backward()
            loss_of(model(batch(step))).backward()
            step_after(model, made)
        states.append(model.state_dict())
        assert len(counts) == 150
    assert differences_of(*states) == []


def test_alone_in_mixed_precision():
    """Where gradients are cast, and so reduced, in a world of one too."""
    states = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        policy = zshard.MixedPrecision(param_dtype=torch.bfloat16)
        model = FSDP(Alone(), auto_wrap_policy={nn.Linear}, mixed_precision=policy)
        made = zshard.AdamW(model.parameters(), 1e-2)
        if in_backward:
            model.optimizer_in_backward(made)
        for step in range(3):
            loss_of(model(batch(step))).backward()
            assert in_backward == all(p.grad is None for p in model.parameters())
            step_after(model, made)
        states.append(model.state_dict())
    assert differences_of(*states) == []


def test_alone_only_one_units_gradients_are_held():
    model, _, _ = alone(True)
    counts = watch(model)
    loss_of(model(batch(0))).backward()
    assert max(held for held, _ in counts) <= 3
    assert all(p.grad is None for p in model.parameters())


def test_alone_a_removed_handle_leaves_nothing():
    model, optimizer, handle = alone(True)
    loss_of(model(batch(0))).backward()
    copied = copy.deepcopy(model)
    handle.remove()
    handle.remove()
    for each in (model, copied):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in each.modules())
        loss_of(each(batch(1))).backward()
        assert all(p.grad is not None for p in each.parameters())
    optimizer.step()
    expected, optimizer, _ = alone(False)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(expected(batch(step))).backward()
        optimizer.step()
    assert differences_of(model.state_dict(), expected.state_dict()) == []


@KINDS
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_alone_every_way_of_checkpointing(way, reentrant):
    states = []
    for in_backward in (False, True):
        model = FSDP(make(functools.partial(Stack, way, reentrant)))
        optimizer = make_optimizer(ADAMW, model)
        if in_backward:
            model.optimizer_in_backward(optimizer)
        if in_backward and reentrant and way in OF_THE_ROOT:
            loss = loss_of(model(leaf(0)))
            assert "unit '' are wanted again in a backward" in message_of(loss.backward)
            return
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model(leaf(0, step))).backward()
            optimizer.step()
        states.append(model.state_dict())
    assert differences_of(*states) == []


# --- step(), schedulers, several optimizers, hooks ------------------------------------------------------


def scheduled(call_step, model, optimizer):
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    in_backward = model in zshard._in_backward._handles
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            loss_of(model(floats(dist.get_rank(), step))).backward()
            if call_step or not in_backward:
                step_after(model, optimizer)
            schedule.step()


@pytest.mark.parametrize("call_step", [True, False])
def test_schedulers_go_on_with_and_without_calls_of_step(pool2, call_step):
    run = functools.partial(scheduled, call_step)
    assert pool2.run(wrong, run, Blocks, [("full_shard", "shm")]) == [{}, {}]


def shares(combination, split):
    """Two optimizers, over parameters that lie in the same units: what differs from steps after
    backward. split: only one of them steps in backward."""
    states, kept = [], []
    for in_backward in (False, True):
        model = wrapped(Blocks, combination)
        params = list(model.parameters())
        a = zshard.AdamW(params[::2], 1e-2)
        b = zshard.SGD([{"params": params[1::4]}, {"params": params[3::4], "lr": 1e-3}], 0.1, 0.9)
        if in_backward:
            model.optimizer_in_backward(*([a] if split else [a, b]))
        for step in range(3):
            loss_of(model(floats(dist.get_rank(), step))).backward()
            kept.append([p.grad is not None for p in params])
            for optimizer in (a, b):
                step_after(model, optimizer)
        states.append(model.state_dict())
    return differences_of(*states), kept


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("split", [True, False])
def test_two_optimizers(pool2, combination, split):
    for found, kept in pool2.run(shares, combination, split):
        assert found == []
        expected = [bool(i % 2) and split for i in range(len(kept[0]))]
        assert kept == [[True] * len(kept[0])] * 3 + [expected] * 3


def hooked(model, optimizer):
    """Users' hooks see the reduced gradient once, and what they change is stepped with."""
    calls = []

    def clamp(param):
        calls.append(param)
        param.grad.clamp_(-1e-3, 1e-3)

    handles = [p.register_post_accumulate_grad_hook(clamp) for p in model.parameters()]
    three_steps(model, optimizer)
    assert len(calls) == 3 * len(handles)
    for handle in handles:
        handle.remove()


def test_users_hooks_run_before_the_step(pool2):
    assert pool2.run(wrong, hooked, Blocks) == [{}, {}]


def removed(combination):
    """What differs after two steps in backward, remove() and two usual steps; memory as before."""
    states, memories = [], []
    for in_backward in (False, True):
        model = wrapped(Blocks, combination)
        optimizer = make_optimizer(ADAMW, model)
        handle = model.optimizer_in_backward(optimizer) if in_backward else None
        for step in range(4):
            if step == 2 and handle is not None:
                handle.remove()
            loss_of(model(floats(dist.get_rank(), step))).backward()
            shown = all(p.grad is not None for p in model.parameters())
            assert shown == (step >= 2 or not in_backward)
            step_after(model, optimizer)
        states.append(model.state_dict())
        memories.append(model.memory()["grads"])
    return differences_of(*states), memories


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_a_removed_handle_leaves_the_model_as_it_was(pool2, combination):
    for found, (usual, after) in pool2.run(removed, combination):
        assert found == []
        assert usual == after > 0


def copies(combination):
    model = wrapped(Blocks, combination)
    model.optimizer_in_backward(make_optimizer(ADAMW, model))
    loss_of(model(floats(dist.get_rank()))).backward()
    copied = copy.deepcopy(model)
    loss_of(copied(floats(dist.get_rank()))).backward()
    return all(p.grad is not None for p in copied.parameters())


@pytest.mark.parametrize("combination", [("full_shard", "shm"), ("no_shard", "c10d")])
def test_a_copy_steps_by_hand(pool2, combination):
    assert pool2.run(copies, combination) == [True, True]


def used_and_dropped(combination):
    model = wrapped(Blocks, combination)
    optimizer = zshard.AdamW(model.parameters())
    model.optimizer_in_backward(optimizer)
    loss_of(model(floats(dist.get_rank()))).backward()
    return [weakref.ref(thing) for thing in (model, optimizer, model.head.weight)]


def freed_at_once(combination):
    used_and_dropped(combination)  # torch's first optimizer leaves a cycle
    gc.collect()
    gc.disable()
    try:
        alive = used_and_dropped(combination)
        return [reference() is not None for reference in alive]
    finally:
        gc.enable()


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_a_dropped_model_is_freed_at_once_with_its_optimizer(pool2, combination):
    assert pool2.run(freed_at_once, combination) == [[False] * 3] * 2


def test_alone_a_dropped_model_is_freed_at_once():
    gc.collect()
    gc.disable()
    try:
        model, optimizer, _ = alone(True)
        loss_of(model(batch(0))).backward()
        references = [weakref.ref(thing) for thing in (model, optimizer, model.shift)]
        del model, optimizer, _
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()


# --- what is refused, and failures ------------------------------------------------------------------------


def test_what_cannot_be_stepped_in_backward():
    model, optimizer, handle = alone(True)
    torchs = torch.optim.AdamW(model.parameters())
    text = message_of(lambda: model.optimizer_in_backward(torchs), TypeError)
    assert "zshard.AdamW" in text and "torch.optim.adamw.AdamW steps all or none" in text
    text = message_of(lambda: model.optimizer_in_backward(optimizer), RuntimeError)
    assert "unit '' is stepped in backward already" in text
    handle.remove()
    other = zshard.AdamW(nn.Linear(2, 2).parameters())
    text = message_of(lambda: model.optimizer_in_backward(other), ValueError)
    assert "none of the model's parameters" in text
    twin = zshard.SGD(model.parameters(), 0.1)
    text = message_of(lambda: model.optimizer_in_backward(optimizer, twin), ValueError)
    assert "two optimizers have the same parameter" in text
    loss_of(model(batch(0))).backward()
    text = message_of(lambda: model.optimizer_in_backward(optimizer), RuntimeError)
    assert "parameter 'shift' has a .grad" in text
    optimizer.zero_grad()
    model.optimizer_in_backward(optimizer)


def clipped_and_scaled(combination):
    model = wrapped(Blocks, combination)
    optimizer = make_optimizer(ADAMW, model)
    handle = model.optimizer_in_backward(optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    texts = []
    for scaler in (zshard.GradScaler("cpu"), torch.amp.GradScaler("cpu")):
        scaled = scaler.scale(loss_of(model(floats(dist.get_rank()))))
        texts.append(message_of(scaled.backward, RuntimeError))
        optimizer.zero_grad()
    assert differences_of(model.state_dict(), before) == []
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(loss_of(model(floats(dist.get_rank())))).backward()
    texts += [
        message_of(lambda: model.clip_grad_norm_(1.0), RuntimeError),
        message_of(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0), RuntimeError),
    ]
    handle.remove()
    scaler = zshard.GradScaler("cpu")
    scaler.scale(loss_of(model(floats(dist.get_rank())))).backward()
    scaler.unscale_(optimizer)
    model.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    return texts


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_clipping_and_loss_scaling_are_refused(pool2, combination):
    for scale, torchs_scale, clip, torchs_clip in pool2.run(clipped_and_scaled, combination):
        assert scale == torchs_scale
        assert "gradients that are still scaled" in scale and "remove() the handle" in scale
        assert clip == torchs_clip
        assert "no gradients to clip" in clip and "remove()" in clip


def within_a_checkpoint(reentrant):
    model = wrapped(Blocks, ("full_shard", "shm"))
    model.optimizer_in_backward(make_optimizer(ADAMW, model))
    loss = loss_of(checkpoint(model, leaf(dist.get_rank()), use_reentrant=reentrant))
    if not reentrant:
        loss.backward()
        return [p.grad is None for p in model.parameters()]
    return message_of(loss.backward, NotImplementedError)


def test_a_reentrant_checkpoint_around_the_model_is_refused(pool2):
    assert all(map(all, pool2.run(within_a_checkpoint, False)))
    for text in pool2.run(within_a_checkpoint, True):
        assert "use_reentrant=False" in text


class Broken(torch.autograd.Function):
    """Raises in backward, at the place of the model where it stands, if told to."""

    raises = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Broken.raises:
            raise ArithmeticError("on purpose")
        return grad


class Fragile(Blocks):
    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = block(Broken.apply(x) if i == 1 else x)
        return self.head(x)


def goes_on(combination):
    """After a backward that raised on all ranks: do the ranks go on together?"""
    model = wrapped(Fragile, combination)
    optimizer = make_optimizer(ADAMW, model)
    model.optimizer_in_backward(optimizer)
    rank = dist.get_rank()
    loss_of(model(floats(rank))).backward()
    Broken.raises = True
    text = message_of(loss_of(model(floats(rank, 1))).backward, ArithmeticError)
    Broken.raises = False
    optimizer.zero_grad()
    for step in range(2, 4):
        loss_of(model(floats(rank, step))).backward()
    assert text == "on purpose"
    assert all(p.grad is None for p in model.parameters())
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_training_goes_on_after_a_backward_that_raised(pool2, combination):
    first, second = pool2.run(goes_on, combination)
    assert differences_of(first, second) == []
    assert all(value.isfinite().all() for value in first.values())


def failing_step(combination):
    """An exception out of the optimizer leaves backward as it is."""
    model = wrapped(Blocks, combination)
    optimizer = make_optimizer(ADAMW, model)
    model.optimizer_in_backward(optimizer)
    loss_of(model(floats(dist.get_rank()))).backward()
    lr = optimizer.param_groups[0].pop("lr")
    text = message_of(loss_of(model(floats(dist.get_rank(), 1))).backward, KeyError)
    optimizer.param_groups[0]["lr"] = lr
    for step in range(2, 4):
        optimizer.zero_grad()
        loss_of(model(floats(dist.get_rank(), step))).backward()
    return text


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_an_error_of_the_optimizer_comes_out_of_backward(pool2, combination):
    assert pool2.run(failing_step, combination) == ["\"a param group has no 'lr'\""] * 2


def used_again(combination):
    """A unit's weight that the loss uses past the unit's forward, while the unit is still whole."""
    model = wrapped(make_used_again, combination, auto_wrap_policy={Block})
    model.optimizer_in_backward(make_optimizer(ADAMW, model))
    x = floats(dist.get_rank()).requires_grad_()
    return message_of(loss_of(model(x)).backward, RuntimeError)


def make_used_again():
    return UsedAgain()


class UsedAgain(nn.Module):
    """The second block's backward ends before the first's recomputation calls it once more."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.once = False

    def sneaky(self, x):
        first = self.blocks[0](x)
        if torch.is_grad_enabled():  # only when it is recomputed
            first = first + self.blocks[1](x)
        return first

    def forward(self, x):
        return self.blocks[1](checkpoint(self.sneaky, x, use_reentrant=True))


# Where ranks meet to gather, a unit is not over before backward is through with it.
GATHERED = [("full_shard", "c10d"), ("shard_grad_op", "c10d")]


@pytest.mark.parametrize("combination", [c for c in COMBINATIONS if c not in GATHERED])
def test_a_unit_that_is_wanted_again_after_its_step_is_an_error(pool2, combination):
    for text in pool2.run(used_again, combination):
        assert "of unit 'blocks.1' are wanted again in a backward" in text
        assert "call optimizer.step() after backward" in text
