"""torch.autograd.grad, and gradients of gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from compare import assert_same, differences
from models import COMBINATIONS, make
from scenarios import (
    Stack,
    all_grads,
    check_mean_grads,
    floats,
    forward_backward,
    loss_of,
    mean_grads,
    message_of,
    whole_grads,
    wrong_grads,
)
from spawn import on_ranks

from zshard import FSDP


def wrap(combination):
    strategy, transport = combination
    return FSDP(make(Stack), strategy=strategy, transport=transport)


def grads_of_parameters(combination):
    """autograd.grad gives the plain model's gradients, leaves no .grad, and training is unaffected."""
    rank = dist.get_rank()
    model, plain = wrap(combination), make(Stack)
    loss = loss_of(model(floats(rank)))
    ours = torch.autograd.grad(loss, list(model.parameters()))
    theirs = torch.autograd.grad(loss_of(plain(floats(rank))), list(plain.parameters()))
    assert_same(ours, theirs, "the gradients")
    assert all(param.grad is None for param in model.parameters())
    forward_backward(model, rank)
    other = wrap(combination)
    forward_backward(other, rank)
    assert_same(all_grads(model), all_grads(other), "the gradients of a later backward")


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_autograd_grad_returns_local_unsharded_gradients(pool2, combination):
    """As under DDP: they are not reduced."""
    pool2.run(grads_of_parameters, combination)


# --- gradients of gradients ------------------------------------------------------------------------


def outputs_of(model, rank):
    x = floats(rank).requires_grad_()
    return x, model(x)


def penalty(model, rank):
    """The norm of the gradient by the input, as WGAN-GP has it."""
    x, y = outputs_of(model, rank)
    (grad,) = torch.autograd.grad(loss_of(y), x, create_graph=True)
    return loss_of(y) + grad.square().sum()


def curvature(model, rank):
    """A gradient of a gradient of the input, whose own gradient is taken."""
    x, y = outputs_of(model, rank)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), x, create_graph=True)
    return second.square().sum()


def of_parameters(model, rank):
    """The norm of this rank's gradients by the parameters, as in MAML."""
    loss = loss_of(model(floats(rank)))
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum(grad.square().sum() for grad in grads)


def by_func_grad(model, rank):
    return torch.func.grad(lambda x: model(x).square().sum())(floats(rank)).square().sum()


def by_func_jacrev(model, rank):
    return torch.func.jacrev(lambda x: model(x).sum(0))(floats(rank)).square().sum()


def by_func_vjp(model, rank):
    y, pull = torch.func.vjp(model, floats(rank))
    return pull(torch.ones_like(y))[0].square().sum() + loss_of(y)


def by_func_jvp(model, rank):
    x = floats(rank)
    y, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return tangent.square().sum() + loss_of(y)


def by_func_vmap(model, rank):
    return torch.func.vmap(model)(floats(rank)).square().sum()


ORDERS = [
    *(penalty, curvature, of_parameters),
    *(by_func_grad, by_func_jacrev, by_func_vjp, by_func_jvp, by_func_vmap),
]


def smooth():
    """Blocks whose second derivatives are not zero."""
    return torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Tanh()) for _ in range(3))
    )


def second_order(run, policy, combination):
    strategy, transport = combination
    model = FSDP(make(smooth), strategy=strategy, transport=transport, auto_wrap_policy=policy)
    for _ in range(2):
        model.zero_grad()
        run(model, dist.get_rank()).backward()
    expected = mean_grads(smooth, lambda plain, rank: run(plain, rank).backward())
    assert_same(whole_grads(model), expected, "the gradients")


@pytest.mark.sampled(16)
@pytest.mark.parametrize("combination", [*COMBINATIONS, ("hybrid_full", "c10d")])
@pytest.mark.parametrize("policy", [None, {torch.nn.Linear}], ids=["one unit", "nested"])
@pytest.mark.parametrize("run", ORDERS)
def test_gradients_of_gradients(pool2, run, policy, combination):
    """To the bit those of plain PyTorch, and reduced."""
    pool2.run(second_order, run, policy, combination)


class Forces(torch.nn.Module):
    """Forces are the gradient of the energy by the positions, taken in the forward."""

    def __init__(self):
        super().__init__()
        self.body, self.scale = smooth(), torch.nn.Parameter(torch.ones(9))

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = (self.body(x) * self.scale).square().sum()
            (grad,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return energy, -grad * self.scale


def forces_loss(model, rank):
    energy, forces = model(floats(rank))
    return energy + forces.square().sum()


def learn_forces(policy, combination):
    strategy, transport = combination
    model = FSDP(make(Forces), strategy=strategy, transport=transport, auto_wrap_policy=policy)
    plain = make(Forces)
    forces_loss(model, dist.get_rank()).backward()
    expected = mean_grads(Forces, lambda plain, rank: forces_loss(plain, rank).backward())
    wrong = wrong_grads(whole_grads(model), expected)
    with torch.no_grad():
        ours, theirs = (each.eval()(floats(0)) for each in (model, plain))
    assert wrong + differences(list(ours), list(theirs)) == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize("combination", [*COMBINATIONS, ("hybrid_full", "c10d")])
@pytest.mark.parametrize("policy", [None, {torch.nn.Linear}], ids=["one unit", "nested"])
def test_autograd_grad_within_forward(pool2, policy, combination):
    """The forward goes on with its parameters, in training and in evaluation."""
    pool2.run(learn_forces, policy, combination)


@pytest.mark.parametrize("combination", [c for c in COMBINATIONS if c[0] != "no_shard"])
@on_ranks(2)
def test_backward_with_create_graph_is_refused(combination):
    """backward(create_graph=True) is refused; training continues."""
    rank = dist.get_rank()
    model = wrap(combination)
    message = message_of(
        lambda: loss_of(model(floats(rank))).backward(create_graph=True), RuntimeError
    )
    assert "torch.autograd.grad(loss, inputs, create_graph=True)" in message
    model.zero_grad()
    forward_backward(model, rank)
    other = wrap(combination)
    forward_backward(other, rank)
    assert_same(all_grads(model), all_grads(other), "the gradients")


def test_world_size_one():
    model, plain = FSDP(make(Stack)), make(Stack)
    penalty(model, 0).backward()
    penalty(plain, 0).backward()
    ours, theirs = ([p.grad for p in each.parameters()] for each in (model, plain))
    assert differences(ours, theirs) == []


# --- backward(inputs=...) --------------------------------------------------------------------------


def last_layer(model, rank):
    loss_of(model(floats(rank))).backward(inputs=list(model.head.parameters()))


def one_weight_of_each_block(model, rank):
    loss = loss_of(model(floats(rank)))
    loss.backward(inputs=[block.up.weight for block in model.blocks])


def parts_one_after_another(model, rank):
    loss = loss_of(model(floats(rank)))
    torch.autograd.backward(loss, inputs=list(model.blocks[2].parameters()), retain_graph=True)
    loss.backward(inputs=[*model.blocks[0].parameters(), *model.head.parameters()])


@pytest.mark.parametrize("run", (last_layer, one_weight_of_each_block, parts_one_after_another))
def test_backward_with_inputs(pool2, run):
    """The others get no gradient."""
    pool2.run(check_mean_grads, Stack, run, True)
