"""state_dict() and load_state_dict() of submodules equal those of the plain model's submodules."""

from __future__ import annotations

import copy
import pickle

import pytest
from models import CASES, Nested, Net, differences, make, sharded, wrapped
from spawn import on_ranks, ranks

import zshard
from zshard import FSDP
from zshard.state import stand_ins

FULL = ("full_shard", "shm")


def every_part(name, combination):
    """Return what differs between the state of each module and that of its plain twin; and after
    each was loaded with other values, what differs between the models."""
    model, (plain, other) = sharded(name, combination), [make(CASES[name].make, s) for s in (1, 2)]
    found = []
    for (where, part), twin in zip(model.named_modules(), plain.modules(), strict=True):
        for options in ({}, {"keep_vars": True, "prefix": "a.b."}):
            ours, theirs = part.state_dict(**options), twin.state_dict(**options)
            found += [f"{where}: {text}" for text in differences(ours, theirs)]
            found += [where] if list(ours) != list(theirs) else []
            for key, value in theirs.items():
                same_kind = type(ours[key]) is type(value)
                same_grad = ours[key].requires_grad == value.requires_grad
                found += [] if same_kind and same_grad else [f"{where}: {key} is of another kind"]
    for part, twin, source in reversed(
        list(zip(model.modules(), plain.modules(), other.modules(), strict=True))
    ):
        part.load_state_dict(source.state_dict())
        twin.load_state_dict(source.state_dict())
        found += differences(model.state_dict(), plain.state_dict())
    return found


PARTS = ["one unit", "tied", "odds", "dtypes", "frozen", "attention", "recurrent", "conv"]


@pytest.mark.parametrize("name", PARTS)
def test_every_submodule_saves_and_loads_as_in_a_plain_model(pool2, name):
    for combination in [FULL, ("shard_grad_op", "c10d")]:
        assert pool2.run(every_part, name, combination) == [[], []]


@ranks(3, 4)
def test_submodules_on_more_ranks(pool):
    assert pool.run(every_part, "odds", FULL) == [[]] * pool.world


def gathers(name, policy):
    """Return how often a unit is gathered for the state of the model, of a list in it, and of one
    layer."""
    model, counts = FSDP(make(CASES[name].make), auto_wrap_policy=policy), []
    method = stand_ins.read_full

    def counted(entries, targets):
        method(entries, targets)
        counts[-1].append((entries[0].unit.name, len(entries)))

    stand_ins.read_full = counted
    try:
        for part in (model, model.blocks, model.norm):
            counts.append([])
            part.state_dict()
    finally:
        stand_ins.read_full = method
    return counts


def test_unit_is_gathered_once_per_call(pool2):
    each = len(list(Nested(11).parameters()))
    for counts in pool2.run(gathers, "net", {Nested}):
        blocks = [(f"blocks.{i}", each) for i in range(3)]
        assert counts == [[("", 5), *blocks], blocks, [("", 2)]]
    for counts in pool2.run(gathers, "net", None):
        assert counts == [[("", 5 + 3 * each)], [("", 3 * each)], [("", 2)]]


@on_ranks(2)
def test_copied_submodules_are_plain():
    """A copied submodule is plain, with its attributes; its shards are not pickled."""
    model = wrapped(Net, FULL, auto_wrap_policy=None)
    found = []
    for part in (model.norm, model.blocks[0], model.blocks):
        with pytest.raises(zshard.ShardError, match="shard of"):
            pickle.dumps(part)
        made = copy.deepcopy(part)
        own = {name: param.detach() for name, param in part.named_parameters()}
        found += differences(made.state_dict(), own)
        made.load_state_dict({name: value + 1 for name, value in own.items()})
        found += differences(made.state_dict(), {n: v + 1 for n, v in own.items()})
    assert found + differences(model.state_dict(), make(Net).state_dict()) == []


def tied_too_late(how):
    """Return the error of state_dict() after a parameter got another place."""
    model = wrapped(Net, FULL, auto_wrap_policy={Nested})
    if how == "tied":
        model.head.weight = model.embed.weight
    else:
        model.other = model.blocks[0].gain
    with pytest.raises(RuntimeError, match="only this rank's shard") as caught:
        model.state_dict()
    return str(caught.value)


@pytest.mark.parametrize("how", ["tied", "given away"])
def test_shard_in_a_state_dict_is_an_error(pool2, how):
    name = {"tied": "head.weight", "given away": "other"}[how]
    for message in pool2.run(tied_too_late, how):
        assert f"'{name}'" in message and "before FSDP" in message
