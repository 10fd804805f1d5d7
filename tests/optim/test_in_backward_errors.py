"""optimizer_in_backward(): refusals and failures.

A step that would be wrong is an error with a remedy, and training continues after it.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from models import COMBINATIONS, loss_of, make_optimizer, wrapped
from models import differences as differences_of
from recomputed import (
    ADAMW,
    alone,
    batch,
    leaf,
)
from scenarios import Stack as Blocks
from scenarios import floats, message_of
from spawn import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import zshard
from zshard import FSDP

# --- refusals and failures --------------------------------------------------------------------------------


def test_unsupported_steps_in_backward():
    model, optimizer, handle = alone(True)
    torchs = torch.optim.AdamW(model.parameters())
    text = message_of(lambda: model.optimizer_in_backward(torchs), TypeError)
    assert (
        "zshard.AdamW" in text
        and "expects zshard.AdamW, Adam or SGD, got torch.optim.adamw.AdamW" in text
    )
    text = message_of(lambda: model.optimizer_in_backward(optimizer), RuntimeError)
    assert "unit '(root)' is already stepped in backward" in text
    handle.remove()
    other = zshard.AdamW(nn.Linear(2, 2).parameters())
    text = message_of(lambda: model.optimizer_in_backward(other), ValueError)
    assert "none of the model's parameters" in text
    twin = zshard.SGD(model.parameters(), 0.1)
    text = message_of(lambda: model.optimizer_in_backward(optimizer, twin), ValueError)
    assert "is in two optimizers" in text
    loss_of(model(batch(0))).backward()
    text = message_of(lambda: model.optimizer_in_backward(optimizer), RuntimeError)
    assert "parameter 'shift' already has a .grad" in text
    optimizer.zero_grad()
    model.optimizer_in_backward(optimizer)


@pytest.mark.parametrize("change", ["added", "removed", "replaced"])
def test_other_parameters_in_the_optimizer_are_refused_before_any_step(change):
    model, _, handle = alone(True)
    handle.remove()
    optimizer = zshard.AdamW(model.layers.parameters(), 1e-2)
    handle = model.optimizer_in_backward(optimizer)
    params = optimizer.param_groups[0]["params"]
    if change == "added":
        optimizer.add_param_group({"params": [model.shift]})
    elif change == "removed":
        del params[0]
    else:
        params[0] = model.shift
    before = {name: value.clone() for name, value in model.state_dict().items()}
    text = message_of(loss_of(model(batch(0))).backward, RuntimeError)
    assert "other parameters than when optimizer_in_backward() was called" in text
    assert "remove() its handle, and call it again" in text
    assert differences_of(model.state_dict(), before) == []
    handle.remove()
    model.zero_grad()
    model.optimizer_in_backward(optimizer)
    loss_of(model(batch(0))).backward()
    moved = set(differences_of(model.state_dict(), before))
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert len(moved) == sum(id(param) in held for param in model.parameters())


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_clipping_and_loss_scaling_are_refused(combination):
    model = wrapped(Blocks, combination)
    optimizer = make_optimizer(ADAMW, model)
    handle = model.optimizer_in_backward(optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scaled = zshard.GradScaler("cpu").scale(loss_of(model(floats(dist.get_rank()))))
    texts = [message_of(scaled.backward, RuntimeError)]
    optimizer.zero_grad()
    assert differences_of(model.state_dict(), before) == []
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model(floats(dist.get_rank())))).backward()
    texts.append(message_of(lambda: scaler.unscale_(optimizer), RuntimeError))
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(loss_of(model(floats(dist.get_rank())))).backward()
    texts += [
        message_of(lambda: model.clip_grad_norm_(1.0), RuntimeError),
        message_of(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0), RuntimeError),
    ]
    handle.remove()
    scaler = zshard.GradScaler("cpu")
    scaler.scale(loss_of(model(floats(dist.get_rank())))).backward()
    scaler.unscale_(optimizer)
    model.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scale, torchs_scale, clip, torchs_clip = texts
    assert scale == torchs_scale
    assert "would check for inf too late" in scale and "remove() on the handle" in scale
    assert clip == torchs_clip
    assert "no gradients to clip" in clip and "remove()" in clip


def within_a_checkpoint(reentrant):
    model = wrapped(Blocks, ("full_shard", "shm"))
    model.optimizer_in_backward(make_optimizer(ADAMW, model))
    loss = loss_of(checkpoint(model, leaf(dist.get_rank()), use_reentrant=reentrant))
    if not reentrant:
        loss.backward()
        return [name for name, p in model.named_parameters() if p.grad is not None]
    return message_of(loss.backward, NotImplementedError)


def test_reentrant_checkpoint_around_the_model_is_refused(pool2):
    assert pool2.run(within_a_checkpoint, False) == [[], []]
    for text in pool2.run(within_a_checkpoint, True):
        assert "use_reentrant=False" in text


class Broken(torch.autograd.Function):
    """Raises in backward at its place in the model, if enabled."""

    raises = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Broken.raises:
            raise ArithmeticError("on purpose")
        return grad


class Fragile(Blocks):
    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = block(Broken.apply(x) if i == 1 else x)
        return self.head(x)


def continues(combination):
    """After a backward that raised on all ranks: do the ranks continue together?"""
    model = wrapped(Fragile, combination)
    optimizer = make_optimizer(ADAMW, model)
    model.optimizer_in_backward(optimizer)
    rank = dist.get_rank()
    loss_of(model(floats(rank))).backward()
    Broken.raises = True
    text = message_of(loss_of(model(floats(rank, 1))).backward, ArithmeticError)
    Broken.raises = False
    optimizer.zero_grad()
    for step in range(2, 4):
        loss_of(model(floats(rank, step))).backward()
    assert text == "on purpose"
    assert [name for name, p in model.named_parameters() if p.grad is not None] == []
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_training_continues_after_a_failed_backward(pool2, combination):
    first, second = pool2.run(continues, combination)
    assert differences_of(first, second) == []
    assert [name for name, value in first.items() if not value.isfinite().all()] == []


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_optimizer_error_propagates_from_backward(combination):
    """An exception of the optimizer propagates out of backward unchanged."""
    model = wrapped(Blocks, combination)
    optimizer = make_optimizer(ADAMW, model)
    model.optimizer_in_backward(optimizer)
    loss_of(model(floats(dist.get_rank()))).backward()
    lr = optimizer.param_groups[0].pop("lr")
    text = message_of(loss_of(model(floats(dist.get_rank(), 1))).backward, KeyError)
    optimizer.param_groups[0]["lr"] = lr
    for step in range(2, 4):
        optimizer.zero_grad()
        loss_of(model(floats(dist.get_rank(), step))).backward()
    assert text == "\"param group lacks 'lr'\""


class Refusing(zshard.SGD):
    """Its step raises on demand."""

    raises = False

    def _step_unit(self, *args):
        if self.raises:
            raise ArithmeticError("in the step")
        super()._step_unit(*args)


class Slow(nn.Module):
    """Sleeps in backward on demand."""

    sleeps = False

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(lambda _: time.sleep(0.5 * self.sleeps))
        return x


def refusing(transport):
    options = {"transport": transport, "timeout": 20}
    blocks = [FSDP(nn.Linear(8, 8), **options) for _ in range(2)]
    model = FSDP(nn.Sequential(blocks[0], Slow(), blocks[1]), **options)
    optimizer = Refusing(model.parameters(), lr=0.1)
    model.optimizer_in_backward(optimizer)
    model(torch.ones(2, 8)).sum().backward()
    return model, optimizer


@on_ranks(2)
def test_rank_alone_evaluates_after_a_step_that_raised():
    """A step raises in backward, on all ranks: rank 0 alone can evaluate then, and training continues."""
    model, optimizer = refusing("shm")
    optimizer.raises = True
    text = message_of(model(torch.ones(2, 8)).sum().backward, ArithmeticError)
    optimizer.raises = False
    if dist.get_rank() == 0:
        with torch.no_grad():
            assert model(torch.ones(2, 8)).isfinite().all()
    dist.barrier()
    model(torch.ones(2, 8)).sum().backward()
    assert text == "in the step"


def raises_before_a_slow_peer(transport):
    """One rank's step raises while another has yet to reduce the next unit: their rounds end, and
    the next forward says that they differ by a step."""
    model, optimizer = refusing(transport)
    first = dist.get_rank() == 0
    optimizer.raises, model[1].sleeps = first, not first
    loss = model(torch.ones(2, 8)).sum()
    text = message_of(loss.backward, ArithmeticError) if first else loss.backward()
    return text, message_of(lambda: model(torch.ones(2, 8)), zshard.DivergenceError)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_step_that_raises_completes_the_rounds(pool2, transport):
    for (text, later), own in zip(
        pool2.run(raises_before_a_slow_peer, transport), (True, False), strict=True
    ):
        assert text == ("in the step" if own else None)
        assert "rank 0 has made 1 optimizer steps, but rank 1 has made 2" in later
