"""zshard.EMA misused: each script gets an error that names the remedy, or the right result, and the
model keeps its own weights."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import make, wrapped
from scenarios import Stack, floats, learn, whole
from spawn import on_ranks
from torch import nn

import zshard
from zshard import EMA, FSDP

WAYS = [("full_shard", "shm"), ("full_shard", "c10d"), ("no_shard", "shm")]


def built(combination, decay=0.9, **options):
    """Return a model after a step, its optimizer and its EMA."""
    model = wrapped(Stack, combination, timeout=10)
    optimizer, ema = zshard.AdamW(model.parameters(), 0.01), EMA(model, decay, **options)
    learn(model, optimizer, 0)
    ema.update()
    learn(model, optimizer, 1)
    return model, optimizer, ema


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0, 1, 1.5, -0.1, True, float("nan"), "0.9", (), (0.9, 0.9)])
def test_decay_out_of_range(decay):
    with pytest.raises(ValueError, match=f"decay must be .*, got {re.escape(repr(decay))}"):
        EMA(FSDP(nn.Linear(2, 2)), decay)


def test_no_module():
    with pytest.raises(TypeError, match=re.escape("EMA(): model must be an nn.Module, got dict")):
        EMA({}, 0.9)


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_every_out_of_range(every):
    with pytest.raises(ValueError, match="every must be a number of update"):
        EMA(FSDP(nn.Linear(2, 2)), 0.9, every=every)


def test_plain_model():
    with pytest.raises(ValueError, match=re.escape("make it after FSDP(...)")):
        EMA(nn.Linear(2, 2), 0.9)


def test_frozen_model():
    with pytest.raises(ValueError, match="found no trainable parameters"):
        EMA(FSDP(nn.Linear(2, 2)).requires_grad_(False), 0.9)


def test_which_of_several():
    model = FSDP(nn.Linear(2, 2))
    ema = EMA(model, (0.9, 0.99))
    for decay in (None, 0.999):
        with pytest.raises(ValueError, match=re.escape("one of the EMA's, (0.9, 0.99)")):
            ema.state_dict(decay)


def test_copies_and_pickles():
    ema = EMA(FSDP(nn.Linear(2, 2)), 0.9)
    for call in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=re.escape("zshard.save(..., ema=ema)")):
            call(ema)


# --- what a script does in between ----------------------------------------------------------------


def before_the_first_update(combination):
    """The average is the model, also where the model was loaded since."""
    model, other = wrapped(Stack, combination), make(Stack, 2)
    ema = EMA(model, 0.9)
    model.load_state_dict(other.state_dict())
    assert_same(ema.state_dict(), other.state_dict(), "the average")
    with ema.swapped():
        assert_same(model.state_dict(), other.state_dict(), "the model")


def within(combination):
    """Calls within swapped() that would be undone at its end, or save averages for weights."""
    model, optimizer, ema = built(combination)
    loss = model(floats(0)).sum()
    before, said = whole(model), []
    calls = (
        optimizer.step,
        torch.optim.SGD(model.parameters(), 0.1).step,
        ema.update,
        ema.state_dict,
        EMA(model, 0.5).state_dict,
        lambda: model.load_state_dict(before),
        lambda: zshard.load_state_dict(model, before),
        lambda: zshard.save("nowhere", model, optimizer),
        lambda: zshard.save("nowhere", model, ema=ema),
    )
    with ema.swapped():
        average = whole(model)
        for call in calls:
            with pytest.raises(RuntimeError, match=r"within ema.swapped\(\)") as caught:
                call()
            said.append(str(caught.value).partition(" within")[0])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        if combination[0] != "no_shard":
            for param in model.parameters():
                param.data.mul_(2)  # is lost
        evaluated = whole(model)
    assert_same(model.state_dict(), before, "the model")
    assert_same(ema.state_dict(), average, "the average")
    assert evaluated.keys() == average.keys()
    learn(model, optimizer, 2)
    return said


@pytest.mark.parametrize("combination", WAYS)
def test_calls_within(pool2, combination):
    pool2.run(before_the_first_update, combination)
    for said in pool2.run(within, combination):
        assert [each.removeprefix("cannot ") for each in said] == [
            *(
                "step",
                "step",
                "update the averages",
                "enter it again",
                "enter it again",
                "load",
                "load",
            ),
            *("save an optimizer or an EMA", "save an optimizer or an EMA"),
        ]


@on_ranks(2)
def test_step_in_backward():
    model = FSDP(make(Stack))
    optimizer, ema = zshard.SGD(model.parameters(), 0.1), EMA(model, 0.9)
    model.optimizer_in_backward(optimizer)
    model(floats(0)).sum().backward()
    ema.update()
    before = whole(model)
    with ema.swapped(), pytest.raises(RuntimeError, match="cannot step within"):
        model(floats(1)).sum().backward()
    assert_same(model.state_dict(), before, "the model")
    model(floats(1)).sum().backward()


@on_ranks(2)
def test_calls_in_a_forward():
    model, _, ema = built(("full_shard", "shm"))
    found = []

    def calls(*_):
        for call in (ema.update, ema.state_dict):
            with pytest.raises(RuntimeError, match="during a step") as caught:
                call()
            found.append(str(caught.value))

    handle = model.blocks[0].up.register_forward_hook(calls)
    output = model(floats(0))
    handle.remove()
    output.register_hook(lambda _: calls())
    output.sum().backward()
    assert len(found) == 4


@on_ranks(2)
def test_changed_models():
    model, _, ema = built(("full_shard", "shm"))
    model.head.weight.requires_grad_(False)
    ema.update()  # still averaged, as by torch's
    plain = make(Stack).requires_grad_(False)
    plain.head.requires_grad_(True)
    frozen = FSDP(plain)
    second = EMA(frozen, 0.9)
    frozen.requires_grad_(True)
    with pytest.raises(
        RuntimeError, match=r"'blocks.0.norm.weight' was removed, replaced or unfrozen"
    ):
        second.state_dict()
    del model.head.bias
    model.head.register_parameter("bias", None)
    with pytest.raises(
        RuntimeError, match=r"'head.bias' was removed, replaced or unfrozen since EMA"
    ):
        ema.state_dict()


@on_ranks(2)
def test_copies_of_the_model():
    """A copy trains apart; the EMA stays with its model, and averages made of copies agree."""
    model, _, ema = built(("full_shard", "shm"), (0.9, 0.5))
    twin, average = copy.deepcopy(model), ema.state_dict(0.5)
    others = EMA(twin, 0.9), EMA(twin, 0.5)
    learn(twin, torch.optim.SGD(twin.parameters(), 1.0), 2)
    for each in others:
        each.update()
    assert_same(ema.state_dict(0.5), average, "the average")
    with others[0].swapped(), ema.swapped(0.9):
        pass
    assert_same(others[0].state_dict(), others[1].state_dict(), "two EMAs")


# --- on one rank only -----------------------------------------------------------------------------


def load_on_rank_0(combination, folder):
    """The load meets the other rank's end of swapped(): no rank waits, and all have their weights."""
    model, _, ema = built(combination)
    zshard.save(f"{folder}/x", model, ema=ema)
    before = [zshard.to_local(param).clone() for param in model.parameters()]
    either = r"load\(\).*ema.swapped|ema.swapped.*load\(\)"
    with pytest.raises(zshard.DivergenceError, match=either), ema.swapped():
        if dist.get_rank() == 0:
            zshard.load(f"{folder}/x", model, ema=ema)
    after = [zshard.to_local(param) for param in model.parameters()]
    return [one.equal(two) for one, two in zip(before, after, strict=True)]


@pytest.mark.parametrize("combination", WAYS)
def test_load_on_one_rank_within(pool2, combination, tmp_path):
    assert all(map(all, pool2.run(load_on_rank_0, combination, str(tmp_path))))


@pytest.mark.parametrize("combination", WAYS)
@on_ranks(2)
def test_update_on_one_rank(combination):
    model, _, ema = built(combination)
    if dist.get_rank() == 0:
        ema.update()
    said = []
    for call in (ema.state_dict, lambda: zshard.save("nowhere", model, ema=ema)):
        with pytest.raises(zshard.DivergenceError) as caught:
            call()
        said.append(str(caught.value))
    for text in said:
        assert "is 2 on rank 0, but 1 on rank 1" in text or "'calls': 2" in text, text


@pytest.mark.parametrize("combination", WAYS)
@on_ranks(2)
def test_swapped_on_one_rank(combination):
    """The other rank trains on, or waits in a barrier: all get an error, and rank 0 its weights."""
    model, optimizer, ema = built(combination)
    with pytest.raises((zshard.DivergenceError, zshard.PeerTimeoutError)) as caught:
        if dist.get_rank() == 0:
            with ema.swapped():
                model(floats(0))
        else:
            learn(model, optimizer, 2)
    said = str(caught.value)
    assert "ema.swapped()" in said, said


def leaves_alone(combination):
    """Rank 1 raises while rank 0 is in a collective forward of the context."""
    model, _, ema = built(combination)
    before = [zshard.to_local(param).clone() for param in model.parameters()]
    kinds = LookupError, zshard.DivergenceError, zshard.PeerError
    with pytest.raises(kinds) as caught, ema.swapped():
        if dist.get_rank() == 1:
            raise LookupError("no data")
        for _ in range(3):
            model(floats(0)).sum().backward()
    after = [zshard.to_local(param).clone() for param in model.parameters()]
    assert_same(after, before, "the parameters")
    return type(caught.value).__name__


@pytest.mark.parametrize("combination", WAYS)
def test_one_rank_raises_in_the_middle(pool2, combination):
    first, second = pool2.run(leaves_alone, combination)
    assert second == "LookupError" and first != "LookupError"
