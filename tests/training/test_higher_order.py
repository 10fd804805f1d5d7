"""torch.autograd.grad, and gradients of gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from models import COMBINATIONS, make
from scenarios import Stack, floats, forward_backward, loss_of, message_of, whole_grads
from spawn import ranks

from zshard import FSDP


def wrap(combination):
    strategy, transport = combination
    return FSDP(make(Stack), strategy=strategy, transport=transport)


def grads_of_parameters(combination):
    """What autograd.grad gives beside what it gives of the plain model on this rank; and whether
    training goes on as if it had not been called."""
    rank = dist.get_rank()
    model, plain = wrap(combination), make(Stack)
    loss = loss_of(model(floats(rank)))
    ours = torch.autograd.grad(loss, list(model.parameters()))
    theirs = torch.autograd.grad(loss_of(plain(floats(rank))), list(plain.parameters()))
    same = all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    untouched = all(param.grad is None for param in model.parameters())
    forward_backward(model, rank)
    other = wrap(combination)
    forward_backward(other, rank)
    after, expected = whole_grads(model), whole_grads(other)
    return same, untouched, all(torch.equal(after[name], expected[name]) for name in expected)


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_autograd_grad_gives_this_ranks_whole_gradients(pool2, combination):
    """As under DDP: they are not reduced."""
    assert pool2.run(grads_of_parameters, combination) == [(True, True, True)] * 2


def penalty(model, rank):
    """The norm of the gradient by the input, as WGAN-GP has it."""
    x = floats(rank).requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
    return grad.square().sum()


def double_backward(combination):
    rank = dist.get_rank()
    model = wrap(combination)
    message = message_of(lambda: penalty(model, rank).backward(), RuntimeError)
    again = message_of(
        lambda: loss_of(model(floats(rank))).backward(create_graph=True), RuntimeError
    )
    model.zero_grad()
    forward_backward(model, rank)
    other = wrap(combination)
    forward_backward(other, rank)
    after, expected = whole_grads(model), whole_grads(other)
    return message, again, all(torch.equal(after[name], expected[name]) for name in expected)


@ranks(2, 3)
@pytest.mark.parametrize("combination", [c for c in COMBINATIONS if c[0] != "no_shard"])
def test_double_backward_is_refused_and_training_goes_on(pool, combination):
    for *messages, same in pool.run(double_backward, combination):
        for message in messages:
            assert "create_graph=True" in message and "no_shard" in message
        assert same


def penalty_grads(combination):
    rank = dist.get_rank()
    model, plain = wrap(combination), make(Stack)
    penalty(model, rank).backward()
    penalty(plain, rank).backward()
    ours = whole_grads(model)
    for name, param in plain.named_parameters():
        if param.grad is None:
            continue
        mean = param.grad.clone()
        dist.all_reduce(mean)
        if not torch.equal(ours[name], mean / dist.get_world_size()):
            return name
    return None


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_where_nothing_is_sharded_it_works(pool2, transport):
    assert pool2.run(penalty_grads, ("no_shard", transport)) == [None, None]


def test_and_in_a_world_of_one():
    model, plain = FSDP(make(Stack)), make(Stack)
    penalty(model, 0).backward()
    penalty(plain, 0).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
