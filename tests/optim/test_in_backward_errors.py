"""optimizer_in_backward(): refusals and failures.

A step that would be wrong is an error with a remedy, and training continues after it.
"""

import copy
import time

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import COMBINATIONS, loss_of, make_optimizer, wrapped
from rows import all_raise
from scenarios import Stack as Blocks
from scenarios import floats, message_of
from spawn import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import zshard
from zshard import FSDP

EACH_COMBINATION = pytest.mark.parametrize("combination", COMBINATIONS)


def blocks(combination=("full_shard", "shm"), build=Blocks):
    """Return a model and its optimizer, which steps in backward, and the handle of that."""
    model = wrapped(build, combination)
    optimizer = make_optimizer("zshard.AdamW", model)
    return model, optimizer, model.optimizer_in_backward(optimizer)


def backward(model, step=0):
    rank = dist.get_rank() if dist.is_initialized() else 0
    loss_of(model(floats(rank, step))).backward()


def values_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_unsupported_steps_in_backward():
    model, optimizer, handle = blocks()
    make = model.optimizer_in_backward
    torchs, twin = torch.optim.AdamW(model.parameters()), zshard.SGD(model.parameters(), 0.1)
    other = zshard.AdamW(nn.Linear(2, 2).parameters())
    expects = "expects zshard.AdamW, Adam or SGD, got torch.optim.adamw.AdamW"
    all_raise(TypeError, {expects: lambda: make(torchs)})
    all_raise(RuntimeError, {"unit 'blocks.0' is already stepped": lambda: make(optimizer)})
    handle.remove()
    backward(model)
    all_raise(
        ValueError,
        {
            "none of the model's parameters": lambda: make(other),
            "is in two optimizers": lambda: make(optimizer, twin),
        },
    )
    all_raise(RuntimeError, {"already has a .grad": lambda: make(optimizer)})
    optimizer.zero_grad()
    make(optimizer)
    copied = copy.deepcopy(model)
    backward(copied)
    assert all(p.grad is not None for p in copied.parameters())  # a copy does not step


@pytest.mark.parametrize("change", ["added", "removed", "replaced"])
def test_other_parameters_in_the_optimizer_are_refused_before_any_step(change):
    model = wrapped(Blocks, ("full_shard", "shm"))
    optimizer = zshard.AdamW(model.blocks.parameters(), 1e-2)
    handle = model.optimizer_in_backward(optimizer)
    params = optimizer.param_groups[0]["params"]
    if change == "added":
        optimizer.add_param_group({"params": [model.head.weight]})
    elif change == "removed":
        del params[0]
    else:
        params[0] = model.head.weight
    before = values_of(model)
    text = message_of(lambda: backward(model), RuntimeError)
    assert "other parameters than when optimizer_in_backward() was called" in text
    assert "remove() its handle, and call it again" in text
    assert_same(values_of(model), before, "the model")
    handle.remove()
    model.zero_grad()
    model.optimizer_in_backward(optimizer)
    backward(model)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name]) == (id(param) not in held), name


@EACH_COMBINATION
@on_ranks(2)
def test_clipping_and_loss_scaling_are_refused(combination):
    model, optimizer, handle = blocks(combination)
    before = values_of(model)
    scaled = zshard.GradScaler("cpu").scale(loss_of(model(floats(dist.get_rank()))))
    texts = [message_of(scaled.backward, RuntimeError)]
    optimizer.zero_grad()
    assert_same(values_of(model), before, "the model")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model(floats(dist.get_rank())))).backward()
    texts.append(message_of(lambda: scaler.unscale_(optimizer), RuntimeError))
    assert texts[0] == texts[1]
    assert "would check for inf too late" in texts[0] and "remove() on the handle" in texts[0]
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(loss_of(model(floats(dist.get_rank())))).backward()
    for clip in (
        lambda: model.clip_grad_norm_(1.0),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    ):
        text = message_of(clip, RuntimeError)
        assert "no gradients to clip" in text and "remove()" in text
    handle.remove()
    scaler = zshard.GradScaler("cpu")
    scaler.scale(loss_of(model(floats(dist.get_rank())))).backward()
    scaler.unscale_(optimizer)
    model.clip_grad_norm_(1.0)
    scaler.step(optimizer)


@on_ranks(2)
def test_reentrant_checkpoint_around_the_model_is_refused():
    def loss(model, reentrant):
        x = floats(dist.get_rank()).requires_grad_()
        return loss_of(checkpoint(model, x, use_reentrant=reentrant))

    model, _, _ = blocks()
    loss(model, False).backward()
    assert all(p.grad is None for p in model.parameters())
    text = message_of(loss(blocks()[0], True).backward, NotImplementedError)
    assert "use_reentrant=False" in text


def fail(_):
    raise ArithmeticError("on purpose")


@pytest.mark.parametrize("what", ["backward", "optimizer"])
@EACH_COMBINATION
@on_ranks(2)
def test_training_continues_after_a_failed_backward(combination, what):
    """An error in the backward, or of the optimizer, propagates; the ranks continue together."""
    model, optimizer, _ = blocks(combination)
    backward(model)
    lr = optimizer.param_groups[0]["lr"]
    if what == "backward":
        handle = model.blocks[1].up.weight.register_hook(fail)
        assert message_of(lambda: backward(model, 1), ArithmeticError) == "on purpose"
        handle.remove()
    else:
        del optimizer.param_groups[0]["lr"]
        said = message_of(lambda: backward(model, 1), KeyError)
        assert said == "\"param group lacks 'lr'\""
        optimizer.param_groups[0]["lr"] = lr
    for step in range(2, 4):
        optimizer.zero_grad()
        backward(model, step)
    assert [name for name, p in model.named_parameters() if p.grad is not None] == []
    states = [None, None]
    dist.all_gather_object(states, model.state_dict())
    assert_same(states[0], states[1], "the model of rank 1")
    assert all(value.isfinite().all() for value in states[0].values())


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
    layers = [FSDP(nn.Linear(8, 8), **options) for _ in range(2)]
    model = FSDP(nn.Sequential(layers[0], Slow(), layers[1]), **options)
    optimizer = Refusing(model.parameters(), lr=0.1)
    model.optimizer_in_backward(optimizer)
    model(torch.ones(2, 8)).sum().backward()
    return model, optimizer


@on_ranks(2)
def test_rank_alone_evaluates_after_a_step_that_raised():
    """A step raises in backward, on all ranks: rank 0 can evaluate alone; training continues."""
    model, optimizer = refusing("shm")
    optimizer.raises = True
    with pytest.raises(ArithmeticError, match="in the step"):
        model(torch.ones(2, 8)).sum().backward()
    optimizer.raises = False
    if dist.get_rank() == 0:
        with torch.no_grad():
            assert model(torch.ones(2, 8)).isfinite().all()
    dist.barrier()
    model(torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_step_that_raises_completes_the_rounds(transport):
    """One rank's step raises while another has yet to reduce the next unit: their rounds end, and
    the next forward says that they differ by a step."""
    model, optimizer = refusing(transport)
    is_first = dist.get_rank() == 0
    optimizer.raises, model[1].sleeps = is_first, not is_first
    loss = model(torch.ones(2, 8)).sum()
    if is_first:
        assert message_of(loss.backward, ArithmeticError) == "in the step"
    else:
        loss.backward()
    later = message_of(lambda: model(torch.ones(2, 8)), zshard.DivergenceError)
    assert "rank 0 has made 1 optimizer steps, but rank 1 has made 2" in later
