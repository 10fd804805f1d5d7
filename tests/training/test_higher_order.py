"""torch.autograd.grad, gradients of gradients, and torch.func on sharded models.

A functional call computes on this rank the same as on a plain model, bit for bit, and the
model trains on as if it had not been.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import COMBINATIONS, Parts, loss_of, make, wrapped
from rows import all_refused
from scenarios import (
    FULL,
    WIDTH,
    Stack,
    all_grads,
    check_mean_grads,
    floats,
    forward_backward,
    mean_grads,
    message_of,
    whole_grads,
)
from spawn import on_ranks
from torch import nn
from torch.func import functional_call, grad, vmap

from zshard import FSDP


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_autograd_grad_returns_local_unsharded_gradients(combination):
    """As under DDP: they are not reduced. None is left in .grad, and training is unaffected."""
    rank = dist.get_rank()
    model, other, plain = (
        wrapped(Stack, combination),
        wrapped(Stack, combination),
        make(Stack),
    )
    ours, theirs = (
        torch.autograd.grad(loss_of(each(floats(rank))), list(each.parameters()))
        for each in (model, plain)
    )
    assert_same(ours, theirs, "the gradients")
    assert all(param.grad is None for param in model.parameters())
    forward_backward(model, rank)
    forward_backward(other, rank)
    assert_same(all_grads(model), all_grads(other), "the gradients of a later backward")


# --- gradients of gradients -----------------------------------------------------------------------


def outputs_of(model, rank):
    x = floats(rank).requires_grad_()
    return x, model(x)


def penalty(model, rank):
    """The norm of the gradient by the input, as in WGAN-GP."""
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


def energy_and_forces(model, rank):
    energy, forces = model(floats(rank))
    return energy + forces.square().sum()


def smooth():
    """Blocks whose second derivatives are not zero."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(3)))


def forces():
    """Forces are the gradient of the energy by the positions, taken in the forward."""

    def forward(model, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = (model.body(x) * model.scale).square().sum()
            (grad,) = torch.autograd.grad(energy, x, create_graph=model.training)
        return energy, -grad * model.scale

    return Parts(forward, body=smooth(), scale=nn.Parameter(torch.ones(9)))


ORDERS = [
    *(penalty, curvature, of_parameters),
    *(by_func_grad, by_func_jacrev, by_func_vjp, by_func_jvp, by_func_vmap),
]


def two_steps(loss, model, rank):
    for _ in range(2):
        model.zero_grad()
        loss(model, rank).backward()


@pytest.mark.sampled(18)
@pytest.mark.parametrize("combination", [*COMBINATIONS, ("hybrid_full", "c10d")])
@pytest.mark.parametrize("policy", [None, {nn.Linear}], ids=["one unit", "nested"])
@pytest.mark.parametrize(
    ("run", "build"), [*((run, smooth) for run in ORDERS), (energy_and_forces, forces)]
)
@on_ranks(2)
def test_gradients_of_gradients(run, build, policy, combination):
    """Bit-identical to those of plain PyTorch, and reduced."""
    check_mean_grads(build, functools.partial(two_steps, run), True, [combination], policy)


@pytest.mark.parametrize("combination", [*COMBINATIONS, ("hybrid_full", "c10d")])
@on_ranks(2)
def test_autograd_grad_within_a_forward_of_an_evaluation(combination):
    """The forward continues with its parameters."""
    with torch.no_grad():
        ours, theirs = (m.eval()(floats(0)) for m in (wrapped(forces, combination), make(forces)))
    assert_same(ours, theirs, "energy and forces")


@pytest.mark.parametrize("combination", [c for c in COMBINATIONS if c[0] != "no_shard"])
@on_ranks(2)
def test_backward_with_create_graph_is_refused(combination):
    """Training continues."""
    rank = dist.get_rank()
    model, other = wrapped(Stack, combination), wrapped(Stack, combination)
    loss = loss_of(model(floats(rank)))
    message = message_of(lambda: loss.backward(create_graph=True), RuntimeError)
    assert "torch.autograd.grad(loss, inputs, create_graph=True)" in message
    model.zero_grad()
    forward_backward(model, rank)
    forward_backward(other, rank)
    assert_same(all_grads(model), all_grads(other), "the gradients")


# --- backward(inputs=...) -------------------------------------------------------------------------


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
@on_ranks(2)
def test_backward_with_inputs(run):
    """The others get no gradient."""
    check_mean_grads(Stack, run, True)


# --- functional_call(): with other tensors, and per-sample gradients ------------------------------


def hyper():
    """A network that makes the weight of another one, a unit."""

    def forward(model, x):
        weight = model.generator(model.code).view(128, WIDTH)
        return functional_call(model.target, {"weight": weight}, (x,))

    target, generator = nn.Linear(WIDTH, 128), nn.Linear(4, 128 * WIDTH)
    code = nn.Parameter(torch.linspace(-1, 1, 4))
    return Parts(forward, target=target, generator=generator, code=code)


def wide():
    """Each rank has a part of the first weight, over both transports."""
    return nn.Sequential(nn.Linear(WIDTH, 600), nn.Tanh(), nn.Linear(600, 2))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_functional_call_with_other_tensors(combination):
    rank, found = dist.get_rank(), []
    model = wrapped(wide, combination)
    for each in (model, make(wide)):
        named = make(wide, seed=3).named_parameters()
        values = {name: (p.detach() * 2).requires_grad_() for name, p in named}
        functional_call(each, values, (floats(rank),)).square().sum().backward()
        found.append({name: value.grad for name, value in values.items()})
    assert_same(*found, "the gradients of the other tensors")
    assert all(p.grad is None for p in model.parameters())
    forward_backward(model, rank)
    assert_same(whole_grads(model), mean_grads(wide, forward_backward), "the gradients")


@on_ranks(2)
def test_hypernetwork():
    check_mean_grads(hyper, forward_backward, True)


def per_sample(module, values):
    def loss(values, x):
        return functional_call(module, values, (x.unsqueeze(0),)).square().sum()

    values = {name: value.detach() for name, value in dict(values).items()}
    return vmap(grad(loss), in_dims=(None, 0))(values, floats(dist.get_rank()))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", ("given", "summoned", "state dict"))
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_per_sample_gradients(combination, how):
    model, plain = wrapped(wide, combination), make(wide)
    if how == "summoned":
        with FSDP.summon_full_params(model):
            ours = per_sample(model, model.named_parameters())
    else:
        ours = per_sample(model, (plain if how == "given" else model).state_dict())
    assert_same(ours, per_sample(plain, plain.named_parameters()), "the gradients")


@on_ranks(2)
def test_replaced_parameter_is_refused_after_a_failed_call():
    model, parameter = wrapped(wide, FULL), nn.Parameter(torch.ones(600, WIDTH))

    def call_with(value):
        return lambda: functional_call(model, {"0.weight": value}, (floats(0),))

    def replaced():
        model[0].weight = parameter
        model(floats(0))

    all_refused(
        {
            "another shape": (call_with(torch.ones(3, 3)), RuntimeError, "shapes"),
            "a parameter": (call_with(parameter), ValueError, "no nn.Parameter"),
            "replaced": (replaced, ValueError, "'0.weight' of unit '0' was replaced"),
            "the remedy": (replaced, ValueError, "functional_call"),
        }
    )


@on_ranks(2)
def test_functional_call_of_other_models_compiles():
    wrapped(wide, FULL)
    plain = nn.Linear(WIDTH, 2)
    values = {name: p.detach() for name, p in plain.named_parameters()}
    call = torch.compile(
        lambda v, x: functional_call(plain, v, (x,)), fullgraph=True, backend="eager"
    )
    assert_same(call(values, floats(0)), plain(floats(0)), "the result")
