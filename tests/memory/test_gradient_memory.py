"""When gradients take memory: from backward until a script drops them, in whatever way."""

from __future__ import annotations

import pytest
import torch
from compare import differences
from models import COMBINATIONS, loss_of, wrapped
from spawn import on_ranks
from torch import nn

import zshard

WIDTH, DEPTH = 256, 4  # 256 KiB a layer


def stack():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])


def gradients_given_up(combination, how):
    """Return the bytes of gradients that the model holds, and those of gradients in its memory:
    before a step, after backward, after zeroing, in the next forward, and after its backward; and
    what differs in the gradients."""
    model = wrapped(stack, combination, auto_wrap_policy={nn.Linear})
    x, found = torch.randn(8, WIDTH), [model.memory()["grads"]]
    loss_of(model(x)).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    found.append(model.memory()["grads"])
    ZEROING[how](model)
    found.append(model.memory()["grads"])
    loss = loss_of(model(x))
    found.append(model.memory()["grads"])
    loss.backward()
    found.append(model.memory()["grads"])
    grads = [p.grad for p in model.parameters()]
    predicted = model.memory("predicted")["grads"]
    assert predicted == model.memory("peak")["grads"]
    return found, predicted, differences(grads, expected)


def one_by_one(model):
    for param in reversed(list(model.parameters())):
        param.grad = None


def deleted(model):
    for param in model.parameters():
        del param.grad


ZEROING = {
    "model": lambda model: model.zero_grad(),
    "optimizer": lambda model: torch.optim.SGD(model.parameters()).zero_grad(),
    "one by one": one_by_one,
    "deleted": deleted,
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("how", ZEROING)
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_gradients_take_memory_from_backward_to_zero_grad(pool2, combination, how):
    for (before, there, zeroed, forward, anew), predicted, wrong in pool2.run(
        gradients_given_up, combination, how
    ):
        # Full gradients belong to the script.
        held = predicted if combination[0] != "no_shard" else 0
        assert (before, there, zeroed, forward, anew) == (0, held, 0, 0, held) and wrong == []


@pytest.mark.parametrize("combination", [("full_shard", "shm"), ("shard_grad_op", "c10d")])
@on_ranks(2)
def test_gradients_that_a_script_keeps_go_with_its_last_reference(combination):
    """Return the bytes of gradients while a script keeps those of an earlier step, and after it has
    dropped them; and whether they stay unchanged."""
    model = wrapped(stack, combination, auto_wrap_policy={nn.Linear})
    loss_of(model(torch.randn(8, WIDTH))).backward()
    kept = [p.grad for p in model.parameters()]
    expected = [zshard.to_local(grad).clone() for grad in kept]
    held = []
    for _ in range(2):
        model.zero_grad()
        loss_of(model(torch.randn(8, WIDTH))).backward()
        held.append(model.memory()["grads"])
    same = all(map(torch.equal, map(zshard.to_local, kept), expected))
    del kept
    model.zero_grad()
    held = [*held, model.memory()["grads"]]
    size = model.memory("predicted")["grads"]
    assert held == [2 * size, 2 * size, 0] and same


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_gradients_zeroed_in_place_keep_their_memory(combination):
    """Return the addresses of gradients after each of two backwards, and what differs from those of
    the second one."""
    model, twin = (wrapped(stack, combination, auto_wrap_policy={nn.Linear}) for _ in range(2))
    inputs = torch.randn(2, 8, WIDTH)
    addresses = []
    for x in inputs:
        model.zero_grad(set_to_none=False)
        loss_of(model(x)).backward()
        addresses.append([zshard.to_local(p.grad).data_ptr() for p in model.parameters()])
    loss_of(twin(inputs[1])).backward()
    (first, second) = addresses
    wrong = differences(*([p.grad for p in net.parameters()] for net in (model, twin)))
    assert first == second and wrong == []
