"""unshard() and reshard(): a unit stays unsharded in between, and the gradients are correct."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import TRANSPORTS, loss_of, make
from scenarios import (
    Stack,
    check_mean_grads,
    floats,
    forward_backward,
    message_of,
    over,
    stack,
    unit_of,
    whole,
    whole_grads,
)
from spawn import on_ranks

import zshard
from zshard import _core

EACH_TRANSPORT = pytest.mark.parametrize("transport", TRANSPORTS)


def stack_over(transport):
    with over(transport):
        return stack()


@contextlib.contextmanager
def in_backward(model, action):
    """Make forwards inside run `action(grad)` during their backwards."""
    norm = model.blocks[0].norm
    handle = norm.register_forward_hook(lambda m, args, out: (out.register_hook(action), out)[1])
    yield
    handle.remove()


def check_a_step(model, other):
    """A step of `model` has the gradients of `other`, which nothing has happened to."""
    for net in (model, other):
        net.zero_grad()
        forward_backward(net, dist.get_rank())
    assert_same(whole_grads(model), whole_grads(other), "the gradients")


def hold(*modules):
    """unshard() of sharded modules; a plain one always has full parameters."""
    for module in modules:
        getattr(module, "unshard", lambda: None)()


def reshard_all(*modules):
    for module in modules:
        getattr(module, "reshard", lambda: None)()


def held_through_a_step(model, rank):
    hold(model, *model.blocks)
    forward_backward(model, rank)


def penalty_of_a_held_weight(model, rank):
    hold(model.head, model.blocks[1])
    loss = loss_of(model(floats(rank)))
    (loss + model.head.weight.square().sum() + model.blocks[1].up.weight.abs().sum()).backward()


def held_between_forward_and_backward(model, rank):
    out = model(floats(rank))
    hold(model.head, model.blocks[2])
    (loss_of(out) + model.head.weight.square().sum()).backward()


def only_outside_of_forward(model, rank):
    hold(model.blocks[0])
    sum(p.square().sum() for p in model.blocks[0].parameters()).backward()


def held_for_the_second_of_two(model, rank):
    forward_backward(model, rank)
    hold(model, model.blocks[0])
    forward_backward(model, rank)


def unsharded_and_resharded(model, rank):
    hold(model, *model.blocks)
    with torch.no_grad():
        model(floats(rank))
        model(floats(rank, 1))
    reshard_all(model, model.blocks[1])
    forward_backward(model, rank)


def resharded_before_the_backward(model, rank):
    out = model(floats(rank))
    reshard_all(model, *model.blocks)
    loss_of(out).backward()


def held_in_no_sync(model, rank):
    hold(model, model.blocks[1])
    with getattr(model, "no_sync", contextlib.nullcontext)():
        forward_backward(model, rank)
    hold(model.blocks[0])
    loss_of(model(floats(rank, 1))).backward()


def held_in_a_forward(model, rank):
    """A block unshards another during its forward, and reads its weights."""

    def hook(module, args, output):
        hold(model.blocks[2])
        return output + model.blocks[2].down.bias

    handle = model.blocks[0].register_forward_hook(hook)
    forward_backward(model, rank)
    handle.remove()


@pytest.mark.parametrize(
    "run",
    [
        held_through_a_step,
        penalty_of_a_held_weight,
        held_between_forward_and_backward,
        only_outside_of_forward,
        held_for_the_second_of_two,
        unsharded_and_resharded,
        resharded_before_the_backward,
        held_in_no_sync,
        held_in_a_forward,
    ],
)
@on_ranks(2, 3, 4)
def test_gradients_are_correct_around_unshard(run):
    exact = dist.get_world_size() == 2 and run is not held_for_the_second_of_two
    check_mean_grads(Stack, run, exact)


@EACH_TRANSPORT
@on_ranks(2)
def test_unit_stays_unsharded_until_reshard_or_the_end_of_backward(transport):
    plain, model = dict(make(Stack).named_parameters()), stack_over(transport)
    inner = model.blocks[0]
    matrices = ["blocks.0.up.weight", "blocks.0.down.weight"]

    def unsharded():
        now = dict(model.named_parameters())
        return [n for n in plain if now[n].shape == plain[n].shape and plain[n].dim() > 1]

    assert unsharded() == []
    inner.unshard(async_op=True).wait()
    assert inner.unshard() is None  # a second time
    ours = {f"blocks.0.{name}": param for name, param in inner.named_parameters()}
    assert_same(ours, {name: plain[name] for name in ours}, "the full parameters")
    assert unsharded() == matrices
    with torch.no_grad():
        model(floats(0))
        inner(floats(0))
    assert unsharded() == matrices
    inner.reshard()
    inner.reshard()
    assert unsharded() == []
    inner.unshard()
    forward_backward(model, 0)
    assert unsharded() == [] and not _core.has_held_units()


@EACH_TRANSPORT
@on_ranks(2)
def test_step_of_unsharded_parameters_is_refused(transport):
    """It would be lost. After reshard() it is that of a model without unshard()."""
    models = stack_over(transport), stack_over(transport)
    block = models[0].blocks[1]
    for cls in (zshard.AdamW, torch.optim.SGD):
        optimizers = [cls(net.parameters(), lr=0.1) for net in models]
        for net in models:
            forward_backward(net, dist.get_rank())
        block.unshard()
        message = message_of(optimizers[0].step, RuntimeError)
        assert "'blocks.1'" in message and "reshard()" in message
        block.reshard()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(*(net.state_dict() for net in models), "the state")


@EACH_TRANSPORT
@on_ranks(2)
def test_changes_while_unsharded_are_errors(transport):
    model, other = stack_over(transport), stack_over(transport)
    block = model.blocks[0]
    block.unshard()
    with torch.no_grad():
        block.up.weight.add_(1)
    messages = [message_of(block.reshard, RuntimeError)]
    block.unshard()
    block.up.weight.data = torch.zeros_like(block.up.weight)
    messages.append(message_of(lambda: model(floats(0)), RuntimeError))
    messages.append(message_of(block.reshard, RuntimeError))
    check_a_step(model, other)
    for message in messages:
        assert "up.weight" in message
        assert "unshard()" in message or "while it was unsharded" in message


@EACH_TRANSPORT
@on_ranks(2)
def test_unshard_and_reshard_at_the_wrong_moment(transport):
    """reshard() in the unit's own forward, both in a backward, and a state_dict there: errors,
    after which training continues."""
    model, other = stack_over(transport), stack_over(transport)
    rank, messages, block = dist.get_rank(), [], model.blocks[1]

    def note(*actions):
        messages.extend(message_of(action, RuntimeError) for action in actions)

    inside = block.norm.register_forward_hook(lambda *_: note(block.reshard))
    with in_backward(model, lambda grad: note(block.unshard, block.reshard, model.state_dict)):
        out = model(floats(rank))
    inside.remove()
    loss_of(out).backward()
    forward_backward(other, rank)
    for number in range(3):  # the others' writes must be visible: sessions are opened as before
        for net in (model, other):
            torch.optim.SGD(net.parameters(), lr=0.1).step()
            net.zero_grad()
            loss_of(net(floats(rank, number))).backward()
    assert_same(model.state_dict(), other.state_dict(), "the state")
    forward, unshard, reshard, save = messages
    assert "'blocks.1' was called during its own forward" in forward
    assert "during a backward" in unshard and "during a backward" in save
    assert "'blocks.1' was called during a backward" in reshard


@EACH_TRANSPORT
@on_ranks(2)
def test_unsharded_unit_takes_its_full_size(transport):
    """Over c10d it has a slot from earlier forwards."""
    model, slots = stack_over(transport), []
    forward_backward(model, 0)
    for change in (lambda: None, model.blocks[0].unshard, model.blocks[0].reshard):
        change()
        slots.append(model.memory()["slots"])
    full = unit_of(model.blocks[0]).bytes["full"]
    assert slots == ([0, full, 0] if transport == "shm" else [slots[0]] * 3)
    assert transport == "shm" or slots[0] >= full


@EACH_TRANSPORT
@on_ranks(2)
def test_state_dict_and_freeing_of_an_unsharded_unit(transport):
    model = stack_over(transport)
    before = whole(model)
    model.blocks[0].unshard()
    assert_same(model.state_dict(), before, "the state dict")
    state = {name: value + 1 for name, value in before.items()}
    model.load_state_dict(state)
    assert_same(model.state_dict(), state, "the loaded state")
    model.blocks[0].unshard()
    assert _core.has_held_units()
    del model
    assert not _core.has_held_units()


@EACH_TRANSPORT
@on_ranks(2)
def test_failed_backward_reshards(transport):
    """A backward that raises on all ranks reshards as well."""
    model, other = stack_over(transport), stack_over(transport)
    model.blocks[0].unshard()
    with in_backward(model, lambda grad: 1 // 0):
        out = model(floats(dist.get_rank()))
    with pytest.raises(ZeroDivisionError):
        loss_of(out).backward()
    assert not _core.has_held_units()
    check_a_step(model, other)
