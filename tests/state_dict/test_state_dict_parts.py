"""state_dict() and load_state_dict() of submodules equal those of the plain model's submodules; and
FSDP1's state_dict_type, which gives rank 0 alone the full state dict.
"""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from compare import assert_same
from models import CASES, COMBINATIONS, Mlp, Nested, Net, make, wrapped
from scenario import sharded
from spawn import on_ranks
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, StateDictType

import zshard
from zshard import FSDP
from zshard.state import stand_ins
from zshard.units.units import units_of

FULL = ("full_shard", "shm")


def kinds_of(state):
    return [(name, type(value), value.requires_grad) for name, value in state.items()]


PARTS = ["one unit", "tied", "odds", "dtypes", "frozen", "attention", "recurrent", "conv"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("combination", [FULL, ("shard_grad_op", "c10d")])
@pytest.mark.parametrize("name", PARTS)
@on_ranks(2, 3)
def test_every_submodule_saves_and_loads_as_in_a_plain_model(name, combination):
    model, (plain, other) = sharded(name, combination), [make(CASES[name].make, s) for s in (1, 2)]
    for (where, part), twin in zip(model.named_modules(), plain.modules(), strict=True):
        for options in ({}, {"keep_vars": True, "prefix": "a.b."}):
            ours, theirs = part.state_dict(**options), twin.state_dict(**options)
            assert_same(ours, theirs, where)
            assert kinds_of(ours) == kinds_of(theirs), where
    models = zip(model.modules(), plain.modules(), other.modules(), strict=True)
    for part, twin, source in reversed(list(models)):
        part.load_state_dict(source.state_dict())
        twin.load_state_dict(source.state_dict())
        assert_same(model.state_dict(), plain.state_dict(), "the model")


@pytest.mark.parametrize("policy", [{Nested}, None], ids=["blocks", "one unit"])
@on_ranks(2)
def test_unit_is_gathered_once_per_call(policy):
    """For the state of the model, of a list in it, and of one layer."""
    model, each, read_full = (
        FSDP(make(Net), auto_wrap_policy=policy),
        len(list(Nested(11).parameters())),
        stand_ins.read_full,
    )
    reads = []

    def read(entries, targets):
        read_full(entries, targets)
        reads.append((entries[0].unit.name, len(entries)))

    blocks = [(f"blocks.{i}", each) for i in range(3)] if policy else [("", 3 * each)]
    whole = [("", 5), *blocks] if policy else [("", 5 + 3 * each)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stand_ins, "read_full", read)
        for part, expected in ((model, whole), (model.blocks, blocks), (model.norm, [("", 2)])):
            part.state_dict()
            assert reads == expected
            reads.clear()


@on_ranks(2)
def test_copied_submodules_are_plain():
    """A copied submodule is plain, with its attributes; its shards are not pickled."""
    model = wrapped(Net, FULL, auto_wrap_policy=None)
    for part in (model.norm, model.blocks[0], model.blocks):
        with pytest.raises(zshard.ShardError, match="shard of"):
            pickle.dumps(part)
        twin = copy.deepcopy(part)
        own = {name: param.detach() for name, param in part.named_parameters()}
        assert_same(twin.state_dict(), own, "the copy")
        own = {name: value + 1 for name, value in own.items()}
        twin.load_state_dict(own)
        assert_same(twin.state_dict(), own, "the copy after a load")
    assert_same(model.state_dict(), make(Net).state_dict(), "the model")


@on_ranks(2)
def test_a_shard_that_got_another_place_is_an_error():
    model = wrapped(Net, FULL, auto_wrap_policy={Nested})
    model.head.weight = model.embed.weight
    words = "only this rank's shard of 'head.weight'.*before FSDP"
    with pytest.raises(RuntimeError, match=words):
        model.state_dict()
    model = wrapped(Net, FULL, auto_wrap_policy={Nested})
    model.other = model.blocks[0].gain
    with pytest.raises(RuntimeError, match=words.replace("head.weight", "other")):
        model.state_dict()


# --- state_dict_type ------------------------------------------------------------------------------------


@on_ranks(2)
def test_rank_0_only():
    """Within a unit, and in another context's; a plain module above a unit has its entire dict."""
    model = make(Mlp)
    FSDP(model.first)

    def lengths():
        return [len(each.state_dict()) for each in (model.first, model)]

    config = FullStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        assert lengths() == [2 if dist.get_rank() == 0 else 0, 5]
        with FSDP.state_dict_type(model, "FULL_STATE_DICT"):
            assert lengths() == [2, 5]
    assert lengths() == [2, 5]


@on_ranks(2)
def test_types_for_shards_have_full_tensors(tmp_path):
    """As FSDP1's scripts save: within the type, by dcp, on all ranks."""
    model, other = FSDP(make(Mlp)), FSDP(make(Mlp, seed=3))
    for kind in ("SHARDED_STATE_DICT", StateDictType.LOCAL_STATE_DICT):
        path = f"{tmp_path}/{getattr(kind, 'name', kind)}"
        with pytest.warns(
            UserWarning, match="_STATE_DICT has full tensors here: .* use zshard.save"
        ):
            FSDP.set_state_dict_type(model, kind)
        state = model.state_dict()
        assert_same(state, make(Mlp).state_dict(), "the state dict")
        dcp.save({"model": state}, checkpoint_id=path)
        loaded = {"model": other.state_dict()}
        dcp.load(loaded, checkpoint_id=path)
        other.load_state_dict(loaded["model"])
        assert_same(other.state_dict(), state, "the loaded model")


def test_other_types_are_refused():
    model = FSDP(make(Mlp))
    match = "state_dict_type must be one of 'FULL_STATE_DICT', 'SHARDED_STATE_DICT'"
    with pytest.raises(ValueError, match=match), FSDP.state_dict_type(model, "WHOLE"):
        pass


def deep():
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])


@pytest.mark.parametrize("combination", [c for c in COMBINATIONS if c[0] != "no_shard"])
@on_ranks(2)
def test_other_ranks_hold_no_full_copy(combination):
    """In copies, and in slots beyond those that steps have reserved."""
    model = wrapped(deep, combination, auto_wrap_policy={nn.Linear})
    reserved = model.memory()["slots"]
    full = sum(p.numel() * p.element_size() for p in deep().parameters())
    new_full, read_full = stand_ins.new_full, stand_ins.read_full
    copies, held = weakref.WeakSet(), []

    def new(entry):
        copy = new_full(entry)
        copies.add(copy.untyped_storage())
        return copy

    def read(entries, targets):
        read_full(entries, targets)
        held.append(sum(each.nbytes() for each in copies) + model.memory()["slots"] - reserved)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stand_ins, "new_full", new)
        patch.setattr(stand_ins, "read_full", read)
        config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            state = model.state_dict()
    if dist.get_rank() == 0:
        assert_same(state, make(deep).state_dict(), "the state dict")
        assert max(held) >= full
    else:
        assert not state
        unit = max(state.unit.bytes["full"] for _, state in units_of(model))
        assert max(held) <= unit + 4096 < full / 3
