"""FSDP1's state_dict_type: who gets the whole state dict."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from models import Mlp, differences, make
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    StateDictType,
)

import zshard
from zshard import FSDP


def on_rank_0():
    model = FSDP(make(Mlp))
    expected = model.state_dict()
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    full = StateDictType.FULL_STATE_DICT
    with FSDP.state_dict_type(model, full, config, FullOptimStateDictConfig()):
        ours = model.state_dict()
        with FSDP.state_dict_type(model, "FULL_STATE_DICT"):
            everywhere = model.state_dict()
    return (
        differences(ours, expected) if dist.get_rank() == 0 else list(ours),
        differences(everywhere, expected) + differences(model.state_dict(), expected),
    )


def test_rank_0_only(pool2):
    assert pool2.run(on_rank_0) == [([], [])] * 2


def of_a_part():
    """A unit within: its dict is cut as well; that of the module above, which is none, is not."""
    model = make(Mlp)
    FSDP(model.first)
    config = FullStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        return len(model.first.state_dict()), len(model.state_dict())


def test_units_within(pool2):
    assert pool2.run(of_a_part) == [(2, 5), (0, 5)]


@pytest.mark.parametrize("name", ["LOCAL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_other_types_are_refused(name):
    model = FSDP(make(Mlp))
    for given in (name, StateDictType[name]):
        with (
            pytest.raises(NotImplementedError, match=name),
            FSDP.state_dict_type(model, given),
        ):
            pass


def test_the_class_has_its_old_name():
    assert zshard.FullyShardedDataParallel is FSDP
