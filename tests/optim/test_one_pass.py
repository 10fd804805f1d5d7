"""Unscaling, clipping and the step read and write no more memory than the step alone."""

import gc

import pytest
import torch
from models import loss_of, wrapped
from scenarios import Stack, floats
from spawn import on_ranks
from torch import nn

import zshard
from zshard import _core


def ask_for_norm(model):
    """From the next backward on, its sums also give the squares."""
    loss_of(model(floats(0))).backward()
    model.clip_grad_norm_(1e9)


def is_pending(model):
    """Whether the gradients were yet to be multiplied; now they are multiplied."""
    before = _core.bytes_passed()
    for param in model.parameters():
        zshard.to_local(param.grad)
    return _core.bytes_passed() > before


@pytest.mark.parametrize("transports", [("shm",), ("c10d", "shm"), ("shm", "c10d")])
@on_ranks(2)
def test_the_step_multiplies(transports):
    """The last model's; those before it have other transports, and gradients."""
    gc.collect()  # a model that dies multiplies what is pending, which counts
    others = [wrapped(Stack, ("full_shard", each)) for each in transports[:-1]]
    for other in others:
        ask_for_norm(other)
    model = wrapped(Stack, ("full_shard", transports[-1]))
    ask_for_norm(model)
    optimizer = zshard.AdamW(model.parameters())
    optimizer.step()
    before = _core.bytes_passed()
    optimizer.step()
    of_a_step = _core.bytes_passed() - before
    optimizer.zero_grad()
    for _ in range(2):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(loss_of(model(floats(1)))).backward()
        grads = [p.grad for p in model.parameters()]
        before = _core.bytes_passed()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.03)
        scaler.step(optimizer)
        assert _core.bytes_passed() - before == of_a_step
        assert is_pending(model) and not is_pending(model)
        optimizer.zero_grad()
        del grads
    loss_of(model(floats(1))).backward()
    assert not is_pending(model)
