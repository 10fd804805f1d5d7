"""FSDP1's state_dict_type: which ranks get the full state dict."""

from __future__ import annotations

import weakref

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from compare import assert_same
from models import COMBINATIONS, Mlp, differences, make, wrapped
from spawn import on_ranks
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    StateDictType,
)

from zshard import FSDP
from zshard.state import stand_ins
from zshard.units.units import units_of


@on_ranks(2)
def test_rank_0_only():
    model = FSDP(make(Mlp))
    expected = model.state_dict()
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    full = StateDictType.FULL_STATE_DICT
    with FSDP.state_dict_type(model, full, config, FullOptimStateDictConfig()):
        ours = model.state_dict()
        with FSDP.state_dict_type(model, "FULL_STATE_DICT"):
            everywhere = model.state_dict()
    assert (differences(ours, expected) if dist.get_rank() == 0 else list(ours)) == []
    assert differences(everywhere, expected) + differences(model.state_dict(), expected) == []


@on_ranks(2)
def test_units_within():
    """An inner unit's dict follows the setting; that of the plain module above does not."""
    model = make(Mlp)
    FSDP(model.first)
    config = FullStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        assert len(model.first.state_dict()) == (2 if dist.get_rank() == 0 else 0)
        assert len(model.state_dict()) == 5


@on_ranks(2)
def test_types_for_shards_have_full_tensors(tmp_path):
    """As FSDP1's scripts save: within the type, by dcp, on all ranks."""
    folder = str(tmp_path)
    model, other = FSDP(make(Mlp)), FSDP(make(Mlp, seed=3))
    for kind in ("SHARDED_STATE_DICT", StateDictType.LOCAL_STATE_DICT):
        path = f"{folder}/{getattr(kind, 'name', kind)}"
        with pytest.warns(
            UserWarning, match=r"_STATE_DICT has full tensors here: .* use zshard\.save"
        ):
            FSDP.set_state_dict_type(model, kind)
        state = model.state_dict()
        assert differences(state, make(Mlp).state_dict()) == []
        dcp.save({"model": state}, checkpoint_id=path)
        loaded = {"model": other.state_dict()}
        dcp.load(loaded, checkpoint_id=path)
        other.load_state_dict(loaded["model"])
        assert differences(other.state_dict(), state) == []


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
    new_full, read_full, copies, held = (
        stand_ins.new_full,
        stand_ins.read_full,
        weakref.WeakSet(),
        [],
    )

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
        unit = max(state.unit.bytes["full"] for _, state in units_of(model))
        assert max(held) <= unit + 4096 < full / 3
