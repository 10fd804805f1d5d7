"""torch.autograd.grad, and gradients of gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from compare import differences
from models import COMBINATIONS, make
from scenarios import Stack, all_grads, floats, forward_backward, loss_of, message_of, whole_grads
from spawn import ranks

from zshard import FSDP


def wrap(combination):
    strategy, transport = combination
    return FSDP(make(Stack), strategy=strategy, transport=transport)


def grads_of_parameters(combination):
    """What autograd.grad gives beside what it gives of the plain model on this rank; the .grad that it
    leaves; and what differs in training that goes on from training without it."""
    rank = dist.get_rank()
    model, plain = wrap(combination), make(Stack)
    loss = loss_of(model(floats(rank)))
    ours = torch.autograd.grad(loss, list(model.parameters()))
    theirs = torch.autograd.grad(loss_of(plain(floats(rank))), list(plain.parameters()))
    wrong = differences(ours, theirs)
    left = [name for name, param in model.named_parameters() if param.grad is not None]
    forward_backward(model, rank)
    other = wrap(combination)
    forward_backward(other, rank)
    return wrong, left, differences(all_grads(model), all_grads(other))


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_autograd_grad_gives_this_ranks_whole_gradients(pool2, combination):
    """As under DDP: they are not reduced."""
    assert pool2.run(grads_of_parameters, combination) == [([], [], [])] * 2


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
    return message, again, differences(all_grads(model), all_grads(other))


@ranks(2, 3)
@pytest.mark.parametrize("combination", [c for c in COMBINATIONS if c[0] != "no_shard"])
def test_double_backward_is_refused_and_training_goes_on(pool, combination):
    for *messages, wrong in pool.run(double_backward, combination):
        for message in messages:
            assert "create_graph=True" in message and "no_shard" in message
        assert wrong == []


def penalty_grads(combination):
    rank = dist.get_rank()
    model, plain = wrap(combination), make(Stack)
    penalty(model, rank).backward()
    penalty(plain, rank).backward()
    ours = whole_grads(model)
    expected = {}
    for name, param in plain.named_parameters():
        if param.grad is not None:
            mean = param.grad.clone()
            dist.all_reduce(mean)
            expected[name] = mean / dist.get_world_size()
    return differences({name: ours[name] for name in expected}, expected)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_where_nothing_is_sharded_it_works(pool2, transport):
    assert pool2.run(penalty_grads, ("no_shard", transport)) == [[], []]


def test_and_in_a_world_of_one():
    model, plain = FSDP(make(Stack)), make(Stack)
    penalty(model, 0).backward()
    penalty(plain, 0).backward()
    ours, theirs = ([p.grad for p in each.parameters()] for each in (model, plain))
    assert differences(ours, theirs) == []
