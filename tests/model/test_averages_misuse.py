"""zshard.EMA misused: each script gets an error that names the remedy, or the right result, and the
model keeps its own weights."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import make, wrapped
from rows import all_refused
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


def test_arguments_out_of_range():
    model, two = FSDP(nn.Linear(2, 2)), EMA(FSDP(nn.Linear(2, 2)), (0.9, 0.99))
    decays = [0, 1, 1.5, -0.1, True, float("nan"), "0.9", (), (0.9, 0.9)]
    build = functools.partial(functools.partial, EMA)
    frozen = FSDP(nn.Linear(2, 2)).requires_grad_(False)
    refuse = "zshard.save(..., ema=ema)"
    all_refused(
        {
            **{f"decay {d!r}": (build(model, d), ValueError, f", got {d!r}") for d in decays},
            **{
                f"every {n!r}": (
                    build(model, 0.9, every=n),
                    ValueError,
                    "every must be a number of",
                )
                for n in (0, -1, 1.5, True)
            },
            "no module": (build({}, 0.9), TypeError, "model must be an nn.Module, got dict"),
            "plain": (build(nn.Linear(2, 2), 0.9), ValueError, "make it after FSDP(...)"),
            "frozen": (build(frozen, 0.9), ValueError, "found no trainable parameters"),
            "which": (two.state_dict, ValueError, "one of the EMA's, (0.9, 0.99)"),
            "none": (lambda: two.state_dict(0.999), ValueError, "one of the EMA's, (0.9, 0.99)"),
            "deepcopy": (lambda: copy.deepcopy(two), TypeError, refuse),
            "copy": (lambda: copy.copy(two), TypeError, refuse),
            "pickle": (lambda: pickle.dumps(two), TypeError, refuse),
        }
    )


# --- scripts in between ---------------------------------------------------------------------------


@pytest.mark.parametrize("combination", WAYS)
@on_ranks(2)
def test_before_the_first_update(combination):
    """The average is the model, also where the model was loaded since."""
    model, other = wrapped(Stack, combination), make(Stack, 2)
    ema = EMA(model, 0.9)
    model.load_state_dict(other.state_dict())
    assert_same(ema.state_dict(), other.state_dict(), "the average")
    with ema.swapped():
        assert_same(model.state_dict(), other.state_dict(), "the model")


@pytest.mark.parametrize("combination", WAYS)
@on_ranks(2)
def test_calls_within(combination):
    """Calls within swapped() that would be undone at its end, or save averages for weights;
    state_dict/test_readers.py has more."""
    model, optimizer, ema = built(combination)
    loss = model(floats(0)).sum()
    before, end = whole(model), "within ema.swapped()"
    save, load = functools.partial(zshard.save, "nowhere", model), f"cannot load {end}"
    step, again = f"cannot step {end}", f"cannot enter it again {end}"
    saved = f"cannot save an optimizer or an EMA {end}"
    with ema.swapped():
        average = whole(model)
        all_refused(
            {
                "step": (torch.optim.SGD(model.parameters(), 0.1).step, RuntimeError, step),
                "zshard's step": (optimizer.step, RuntimeError, step),
                "update": (ema.update, RuntimeError, f"cannot update the averages {end}"),
                "load": (lambda: model.load_state_dict(before), RuntimeError, load),
                "from rank 0": (lambda: zshard.load_state_dict(model, before), RuntimeError, load),
                "average": (ema.state_dict, RuntimeError, again),
                "another average": (EMA(model, 0.5).state_dict, RuntimeError, again),
                "save": (lambda: save(optimizer), RuntimeError, saved),
                "save an EMA": (lambda: save(ema=ema), RuntimeError, saved),
                "backward": (loss.backward, RuntimeError, "modified by an inplace operation"),
            }
        )
        if combination[0] != "no_shard":
            for param in model.parameters():
                param.data.mul_(2)  # is lost
        assert whole(model).keys() == average.keys()
    assert_same(model.state_dict(), before, "the model")
    assert_same(ema.state_dict(), average, "the average")
    learn(model, optimizer, 2)


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
def test_changed_models():
    model, _, ema = built(("full_shard", "shm"))
    model.head.weight.requires_grad_(False)
    ema.update()  # still averaged, as by torch's
    frozen = make(Stack)
    frozen.blocks.requires_grad_(False)
    frozen = FSDP(frozen)
    second = EMA(frozen, 0.9)
    frozen.requires_grad_(True)
    model.head.bias = None
    changed = "{} was removed, replaced or unfrozen since EMA"
    all_refused(
        {
            "removed": (ema.state_dict, RuntimeError, changed.format("'head.bias'")),
            "unfrozen": (second.state_dict, RuntimeError, changed.format("'blocks.0.norm.weight'")),
        }
    )


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


def shards(model):
    return [zshard.to_local(param).clone() for param in model.parameters()]


@pytest.mark.parametrize("combination", WAYS)
@on_ranks(2)
def test_load_on_one_rank_within(combination, tmp_path):
    """The load meets the other rank's end of swapped(): no rank waits, and all have their weights."""
    model, _, ema = built(combination)
    zshard.save(f"{tmp_path}/x", model, ema=ema)
    before = shards(model)
    either = r"load\(\).*ema.swapped|ema.swapped.*load\(\)"
    with pytest.raises(zshard.DivergenceError, match=either), ema.swapped():
        if dist.get_rank() == 0:
            zshard.load(f"{tmp_path}/x", model, ema=ema)
    assert_same(shards(model), before, "the parameters")


@pytest.mark.parametrize("combination", WAYS)
@on_ranks(2)
def test_update_on_one_rank(combination):
    model, _, ema = built(combination)
    if dist.get_rank() == 0:
        ema.update()
    for call in (ema.state_dict, lambda: zshard.save("nowhere", model, ema=ema)):
        with pytest.raises(zshard.DivergenceError, match=r"is 2 on rank 0, but 1 on|'calls': 2"):
            call()


@pytest.mark.parametrize("combination", WAYS)
@on_ranks(2)
def test_swapped_on_one_rank(combination):
    """The other rank trains on: all get an error."""
    model, optimizer, ema = built(combination)
    kinds = zshard.DivergenceError, zshard.PeerTimeoutError
    with pytest.raises(kinds, match=r"ema.swapped\(\)"):
        if dist.get_rank() == 0:
            with ema.swapped():
                model(floats(0))
        else:
            learn(model, optimizer, 2)


@pytest.mark.parametrize("combination", WAYS)
@on_ranks(2)
def test_one_rank_raises_in_the_middle(combination):
    """Rank 1 raises while rank 0 is in a collective forward of the context."""
    model, _, ema = built(combination)
    before, raises = shards(model), dist.get_rank() == 1
    kinds = LookupError if raises else (zshard.DivergenceError, zshard.PeerError)
    with pytest.raises(kinds), ema.swapped():
        if raises:
            raise LookupError("no data")
        for _ in range(3):
            model(floats(0)).sum().backward()
    assert_same(shards(model), before, "the parameters")
