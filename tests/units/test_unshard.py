"""unshard() and reshard(): a unit stays unsharded in between, and the gradients are correct."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from models import TRANSPORTS, differences, make
from scenarios import (
    Stack,
    floats,
    forward_backward,
    loss_of,
    message_of,
    over,
    stack,
    unit_of,
    whole_grads,
    wrong_grads,
    wrong_in,
)
from spawn import on_ranks, ranks

import zshard
from zshard import _core


@contextlib.contextmanager
def in_backward(model, action):
    """Make forwards inside run `action(grad)` during their backwards."""
    first = model.blocks[0]
    handle = first.norm.register_forward_hook(
        lambda m, args, out: (out.register_hook(action), out)[1]
    )
    yield
    handle.remove()


def wrong_in_a_step(model, other):
    """Return the gradients of a forward and a backward of `model` that differ from those of
    `other`."""
    for net in (model, other):
        forward_backward(net, dist.get_rank())
    return wrong_grads(whole_grads(model), whole_grads(other))


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
    ("run", "exact"),
    [
        (held_through_a_step, True),
        (penalty_of_a_held_weight, True),
        (held_between_forward_and_backward, True),
        (only_outside_of_forward, True),
        (held_for_the_second_of_two, False),
        (unsharded_and_resharded, True),
        (resharded_before_the_backward, True),
        (held_in_no_sync, True),
        (held_in_a_forward, True),
    ],
)
def test_gradients_are_correct_around_unshard(pool2, run, exact):
    assert pool2.run(wrong_in, Stack, run, exact) == [{}, {}]


@ranks(3, 4)
def test_gradients_are_correct_on_more_ranks(pool):
    assert pool.run(wrong_in, Stack, penalty_of_a_held_weight, False) == [{}] * pool.world


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_unit_stays_unsharded_until_reshard_or_the_end_of_backward(transport):
    """Return whose parameters are unsharded: before, in between, over forwards, afterwards; and
    what differs in their values."""
    plain = dict(make(Stack).named_parameters())
    with over(transport):
        model = stack()
    inner = model.blocks[0]
    mine = [name for name in plain if name.startswith("blocks.0.")]

    def whole():
        now = dict(model.named_parameters())
        return [n for n in plain if now[n].shape == plain[n].shape and plain[n].dim() > 1]

    found = [whole()]
    handle = inner.unshard(async_op=True)
    handle.wait()
    assert inner.unshard() is None  # a second time
    ours = dict(model.named_parameters())
    wrong = differences({n: ours[n] for n in mine}, {n: plain[n] for n in mine})
    found.append(whole())
    with torch.no_grad():
        model(floats(0))
        inner(floats(0))
    found.append(whole())
    inner.reshard()
    inner.reshard()
    found.append(whole())
    inner.unshard()
    forward_backward(model, 0)
    found.append(whole())
    matrices = [n for n in mine if plain[n].dim() > 1]
    assert found == [[], matrices, matrices, [], []]
    assert wrong == []
    assert not (_core.has_held_units())


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_step_of_unsharded_parameters_is_refused(transport):
    """Return (messages of steps that would be lost, what differs from a model without
    unshard())."""
    with over(transport):
        model, other = stack(), stack()
    rank, messages = dist.get_rank(), []
    for cls in (zshard.AdamW, torch.optim.SGD):
        optimizers = [cls(net.parameters(), lr=0.1) for net in (model, other)]
        for net in (model, other):
            forward_backward(net, rank)
        model.blocks[1].unshard()
        messages.append(message_of(optimizers[0].step, RuntimeError))
        model.blocks[1].reshard()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    wrong = differences(model.state_dict(), other.state_dict())
    assert wrong == []
    for message in messages:
        assert "'blocks.1'" in message and "reshard()" in message


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_changes_while_unsharded_are_errors(transport):
    with over(transport):
        model, other = stack(), stack()
    block, rank = model.blocks[0], dist.get_rank()
    block.unshard()
    with torch.no_grad():
        block.up.weight.add_(1)
    messages = [message_of(block.reshard, RuntimeError)]
    block.unshard()
    block.up.weight.data = torch.zeros_like(block.up.weight)
    messages.append(message_of(lambda: model(floats(rank)), RuntimeError))
    messages.append(message_of(block.reshard, RuntimeError))
    wrong = wrong_in_a_step(model, other)
    assert wrong == []
    for message in messages:
        assert "up.weight" in message
        assert "unshard()" in message or "while it was unsharded" in message


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_unshard_and_reshard_at_the_wrong_moment(transport):
    """reshard() in the unit's own forward, both in a backward, and a state_dict there: errors,
    after which training continues."""
    with over(transport):
        model, other = stack(), stack()
    rank, messages = dist.get_rank(), []
    block = model.blocks[1]

    def note(*actions):
        for action in actions:
            messages.append(message_of(action, RuntimeError))

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
    (forward, unshard, reshard, save) = messages
    wrong = differences(model.state_dict(), other.state_dict())
    assert wrong == []
    assert "'blocks.1' was called during its own forward" in forward
    assert "during a backward" in unshard and "during a backward" in save
    assert "'blocks.1' was called during a backward" in reshard


def bytes_while_held(transport):
    with over(transport):
        model = stack()
    forward_backward(model, 0)
    before = model.memory()["slots"]
    model.blocks[0].unshard()
    during = model.memory()["slots"]
    model.blocks[0].reshard()
    return before, during, model.memory()["slots"], unit_of(model.blocks[0]).bytes["full"]


def test_unsharded_unit_takes_its_full_size(pool2):
    for before, during, after, full in pool2.run(bytes_while_held, "shm"):
        assert before == after == 0 and during == full
    for before, during, after, full in pool2.run(bytes_while_held, "c10d"):
        assert before == during == after >= full  # a slot from earlier forwards


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_state_dict_and_freeing_of_an_unsharded_unit(transport):
    with over(transport):
        model = stack()
    state = {name: value + 1 for name, value in model.state_dict().items()}
    model.blocks[0].unshard()
    saved = differences({k: v + 1 for k, v in model.state_dict().items()}, state)
    model.load_state_dict(state)
    wrong = differences(model.state_dict(), state)
    model.blocks[0].unshard()
    held = _core.has_held_units()
    del model
    assert saved == []
    assert wrong == []
    assert held
    assert not (_core.has_held_units())


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_failed_backward_reshards(transport):
    """A backward that raises on all ranks reshards as well."""
    with over(transport):
        model, other = stack(), stack()
    rank = dist.get_rank()
    model.blocks[0].unshard()
    with in_backward(model, lambda grad: 1 // 0):
        out = model(floats(rank))
    with contextlib.suppress(ZeroDivisionError):
        loss_of(out).backward()
    held = _core.has_held_units()
    model.zero_grad()
    assert not (held)
    assert wrong_in_a_step(model, other) == []
