"""Scenarios, (model, rank) -> None, as in scripts: SCENARIOS, each with whether its results are
bit-exact.

A scenario ends with gradients, which must be the mean of the ranks' gradients.
"""

from __future__ import annotations

import torch
from compare import assert_same
from models import loss_of, make
from scenarios import Stack, floats


def accumulate(model, rank):
    for step in range(3):
        loss_of(model(floats(rank, step))).backward()


def zero_grad_both_ways(model, rank):
    for step, set_to_none in enumerate((True, False, True, False, False)):
        model.zero_grad(set_to_none=set_to_none)
        loss_of(model(floats(rank, step))).backward()


def scale_the_gradients_between(model, rank):
    loss_of(model(floats(rank))).backward()
    for param in model.parameters():
        param.grad.mul_(0.5)
    loss_of(model(floats(rank, 1))).backward()


def two_forwards_one_backward(model, rank):
    (loss_of(model(floats(rank))) + loss_of(model(floats(rank, 1)))).backward()


def two_forwards_two_backwards(model, rank):
    first, second = loss_of(model(floats(rank))), loss_of(model(floats(rank, 1)))
    first.backward()
    second.backward()


def two_forwards_backwards_the_other_way(model, rank):
    first, second = loss_of(model(floats(rank))), loss_of(model(floats(rank, 1)))
    second.backward()
    first.backward()


def forward_without_backward(model, rank):
    kept = model(floats(rank, 1))
    loss_of(model(floats(rank))).backward()
    del kept
    model(floats(rank, 2))
    loss_of(model(floats(rank, 3))).backward()


def no_grad_forward_between(model, rank):
    loss = loss_of(model(floats(rank)))
    with torch.no_grad():
        model(floats(rank, 1))
    loss.backward()


def retain_graph(model, rank):
    loss = loss_of(model(floats(rank)))
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def evaluate_then_train(model, rank):
    model.eval()
    with torch.no_grad():
        model(floats(rank, 1))
    with torch.inference_mode():
        model(floats(rank, 2))
    model(floats(rank, 3))  # with gradients on, but unused
    model.train()
    loss_of(model(floats(rank))).backward()


def gradient_of_the_input_only(model, rank):
    x = floats(rank).requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(model(x)), x)
    assert grad.abs().sum() > 0
    assert [name for name, param in model.named_parameters() if param.grad is not None] == []
    loss_of(model(grad)).backward()


def input_that_wants_a_gradient(model, rank):
    x = floats(rank).requires_grad_()
    loss_of(model(x)).backward()
    plain = make(Stack)
    y = floats(rank).requires_grad_()
    loss_of(plain(y)).backward()
    assert_same(x.grad, y.grad, "the input's gradient")


def autocast(model, rank):
    """A gather casts separately (test_autocast.py), so the plain model must cast again as well."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model(floats(rank)))
        torch.clear_autocast_cache()
        loss = loss + loss_of(model(floats(rank, 1)))
    loss.backward()


def nothing_to_learn_from(model, rank):
    """A loss that does not depend on the model on rank 1: this rank's share is zero."""
    output = model(floats(rank))
    (output if rank == 0 else output * 0.0).sum().backward()


def freeze_later(model, rank):
    loss_of(model(floats(rank))).backward()
    model.blocks[1].requires_grad_(False)
    model.head.bias.requires_grad_(False)
    model.zero_grad()
    loss_of(model(floats(rank, 1))).backward()


def freeze_and_thaw(model, rank):
    model.blocks[1].requires_grad_(False)
    loss_of(model(floats(rank))).backward()
    model.blocks[1].requires_grad_(True)
    loss_of(model(floats(rank, 1))).backward()


def kept_statistics(model, rank):
    """Statistics of the parameters with unused autograd history, as scripts log them."""
    kept = []
    for step in range(2):
        kept.append([p.square() for p in model.parameters()])
        loss_of(model(floats(rank, step))).backward()
        kept.append([p.square() for p in model.parameters()])


def submodule_by_itself(model, rank):
    """A block is called without its root, and its output is trained on."""
    loss_of(model.blocks[1](floats(rank))).backward()
    loss_of(model(floats(rank, 1))).backward()


SCENARIOS = [
    (accumulate, False),
    (zero_grad_both_ways, True),
    (scale_the_gradients_between, False),
    (two_forwards_one_backward, True),
    (two_forwards_two_backwards, False),
    (two_forwards_backwards_the_other_way, False),
    (forward_without_backward, False),
    (no_grad_forward_between, True),
    (retain_graph, False),
    (evaluate_then_train, True),
    (gradient_of_the_input_only, True),
    (input_that_wants_a_gradient, True),
    (autocast, True),
    (nothing_to_learn_from, True),
    (freeze_later, True),
    (freeze_and_thaw, False),
    (kept_statistics, False),
    (submodule_by_itself, False),
]
