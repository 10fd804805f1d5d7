"""Writes to what state_dict() has returned: they count under DDP; of sharded parameters they are
lost, and one warning per model says so."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from models import COMBINATIONS, wrapped
from scenarios import Stack, floats
from spawn import on_ranks

import zshard
from zshard import FSDP

WEIGHT = "blocks.1.up.weight"


def written_later(model, optimizer, step):
    state = model.state_dict()
    step()
    step()
    state["head.bias"][1:].mul_(2)


def averages_by_hand(model, optimizer, step):
    average = copy.deepcopy(model)
    both = [each.state_dict().values() for each in (average, model)]
    for ours, theirs in zip(*both, strict=True):
        ours.mul_(0.9).add_(theirs, alpha=0.1)


def pruned(model, optimizer, step):
    for value in model.state_dict().values():
        value.mul_(value.abs() > 0.1)


@torch.no_grad()
def kept_vars(model, optimizer, step):
    model.blocks.state_dict(keep_vars=True)["1.up.weight"].zero_()


def moments(optimizer):
    return optimizer.state_dict()["state"][0]["exp_avg"]


LOST = {
    "an entry": lambda model, *_: model.state_dict()[WEIGHT].copy_(torch.zeros(())),
    "a part's entry": lambda model, *_: model.blocks[1].up.state_dict()["weight"].zero_(),
    "an optimizer's": lambda model, optimizer, step: moments(optimizer).zero_(),
    "later": written_later,
    "averages by hand": averages_by_hand,
    "pruned": pruned,
    "kept variables": kept_vars,
}


def zeroed_and_loaded(owner, load, key):
    """Load a state dict after a write to it."""
    state = owner.state_dict()
    (state[key] if key in state else state["state"][0][key]).zero_()
    load(state)


def both_loaded(model, optimizer, step):
    """Write to both state dicts in place, as dcp.load does, then load them in both orders."""
    for first in (model, optimizer):
        second = optimizer if first is model else model
        states = {owner: owner.state_dict() for owner in (model, optimizer)}
        states[model][WEIGHT].zero_()
        states[optimizer]["state"][0]["exp_avg"].zero_()
        first.load_state_dict(states[first])
        second.load_state_dict(states[second])


def only_read(model, optimizer, step):
    both = [model.state_dict(), optimizer.state_dict()]
    torch.save(copy.deepcopy(both), io.BytesIO())
    step()
    torch.save(both, io.BytesIO())
    sum(value.sum() for value in both[0].values())


def of_other_calls(model, optimizer, step):
    with FSDP.state_dict_type(model, "FULL_STATE_DICT"):
        model.state_dict()[WEIGHT].zero_()
    next(iter(zshard.export(model)))[WEIGHT].zero_()
    zshard.full_tensor(model.head.weight).zero_()
    zshard.optim_state_dict(model, optimizer)["state"][WEIGHT]["exp_avg"].zero_()
    with FSDP.summon_full_params(model, writeback=False):
        model.state_dict()[WEIGHT].zero_()


FINE = {
    "loaded": lambda model, *_: zeroed_and_loaded(model, model.load_state_dict, WEIGHT),
    "a part loaded": lambda model, *_: zeroed_and_loaded(
        model.blocks, model.blocks.load_state_dict, "1.up.weight"
    ),
    "loaded by zshard": lambda model, *_: zeroed_and_loaded(
        model, lambda state: zshard.load_state_dict(model, state), WEIGHT
    ),
    "an optimizer's, loaded": lambda model, optimizer, step: zeroed_and_loaded(
        optimizer, optimizer.load_state_dict, "exp_avg"
    ),
    "both, one after the other": both_loaded,
    "only read": only_read,
    "of other calls": of_other_calls,
}


def warnings_of(write, combination, folder=None):
    """Return the warnings of a script that writes twice, and then steps, or saves to `folder`."""
    model = wrapped(Stack, combination)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def step():
        model(floats(0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
        for _ in range(2):
            write(model, optimizer, step)
            if folder is None:
                step()
            else:
                zshard.save(folder, model, optimizer, overwrite=True)
    return [str(each.message) for each in caught if "is lost" in str(each.message)]


@pytest.mark.parametrize("after", ["step", "save"])
@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("write", LOST)
@on_ranks(2)
def test_a_lost_write_is_one_warning(write, combination, after, tmp_path):
    folder = tmp_path / "saved" if after == "save" else None
    texts = warnings_of(LOST[write], combination, folder)
    if combination[0] == "no_shard":  # it is not lost
        assert texts == []
    else:
        assert "load_state_dict()" in texts[0]
        assert len(texts) == (2 if write == "averages by hand" else 1)  # one for each copy


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("write", FINE)
@on_ranks(2)
def test_what_is_loaded_or_read_is_no_warning(write, combination):
    assert warnings_of(FINE[write], combination) == []
