"""When gradients take memory: from backward until a script drops them, in whatever way."""

from __future__ import annotations

import pytest
import torch
from compare import assert_same
from models import COMBINATIONS, loss_of, wrapped
from spawn import on_ranks
from torch import nn

import zshard

WIDTH, DEPTH = 256, 4  # 256 KiB a layer


def stack():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])


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
@on_ranks(2)
def test_gradients_take_memory_from_backward_to_zero_grad(combination, how):
    model = wrapped(stack, combination, auto_wrap_policy={nn.Linear})
    size = model.memory("predicted")["grads"]
    held = size if combination[0] != "no_shard" else 0  # full gradients belong to the script
    x = torch.randn(8, WIDTH)
    assert model.memory()["grads"] == 0
    loss_of(model(x)).backward()
    assert model.memory()["grads"] == held
    expected = [p.grad.clone() for p in model.parameters()]
    ZEROING[how](model)
    assert model.memory()["grads"] == 0
    loss = loss_of(model(x))
    assert model.memory()["grads"] == 0
    loss.backward()
    assert model.memory()["grads"] == held
    assert model.memory("peak")["grads"] == model.memory("predicted")["grads"] == size
    assert_same([p.grad for p in model.parameters()], expected, "the gradients")


@pytest.mark.parametrize("combination", [("full_shard", "shm"), ("shard_grad_op", "c10d")])
@on_ranks(2)
def test_gradients_that_a_script_keeps_go_with_its_last_reference(combination):
    model = wrapped(stack, combination, auto_wrap_policy={nn.Linear})
    size = model.memory("predicted")["grads"]
    loss_of(model(torch.randn(8, WIDTH))).backward()
    kept = [p.grad for p in model.parameters()]
    expected = [zshard.to_local(grad).clone() for grad in kept]
    for _ in range(2):
        model.zero_grad()
        loss_of(model(torch.randn(8, WIDTH))).backward()
        assert model.memory()["grads"] == 2 * size
    assert_same(kept, expected, "the kept gradients")
    del kept
    model.zero_grad()
    assert model.memory()["grads"] == 0


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_gradients_zeroed_in_place_keep_their_memory(combination):
    model, twin = (wrapped(stack, combination, auto_wrap_policy={nn.Linear}) for _ in range(2))
    inputs = torch.randn(2, 8, WIDTH)
    addresses = []
    for x in inputs:
        model.zero_grad(set_to_none=False)
        loss_of(model(x)).backward()
        addresses.append([zshard.to_local(p.grad).data_ptr() for p in model.parameters()])
    assert addresses[0] == addresses[1]
    loss_of(twin(inputs[1])).backward()
    assert_same(*([p.grad for p in each.parameters()] for each in (model, twin)), "the gradients")
