"""Tensors that modules save by get_extra_state(), as in 8-bit training, in checkpoints.

set_extra_state() may do anything with a tensor, so it gets one with its values, after everything
that is loaded has been checked.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import manifest_in, tensors_in
from safetensors.torch import save_file
from torch import nn

import zshard
from zshard import FSDP


class Scaled(nn.Linear):
    """Its extra state is a tensor of bytes, from which it computes something on loading."""

    def __init__(self):
        super().__init__(3, 3)
        self.peaks = torch.zeros(2)

    def get_extra_state(self):
        return self.peaks.view(torch.uint8)

    def set_extra_state(self, state):
        self.peaks = state.cpu().clone().view(torch.float32) * 1


def made(value, wrapped=True):
    torch.manual_seed(int(value))
    model = nn.Sequential(Scaled(), nn.Linear(3, 2))
    model[0].peaks.fill_(value)
    return FSDP(model) if wrapped else model


def there_and_back(folder):
    zshard.save(f"{folder}/x", made(5))
    loaded = []
    for wrapped in (True, False):
        model = made(7, wrapped)
        zshard.load(f"{folder}/x", model)
        loaded.append(model[0].peaks.tolist())
    return loaded


def test_tensor_round_trips(pool2, tmp_path):
    assert pool2.run(there_and_back, tmp_path) == [[[5, 5], [5, 5]]] * 2
    assert "0._extra_state" not in tensors_in(tmp_path / "x")
    assert list(manifest_in(tmp_path / "x").model["extra_state"]) == ["0._extra_state"]


def by_safetensors(folder, state):
    folder.mkdir()
    save_file(dict(state), folder / "model.safetensors")


def by_torch(folder, state):
    dcp.save({"model": dict(state)}, checkpoint_id=folder)


@pytest.mark.filterwarnings("ignore:torch.distributed")
@pytest.mark.parametrize("write", [by_safetensors, by_torch])
def test_tensor_written_by_other_tools(write, tmp_path):
    write(tmp_path / "x", made(5, False).state_dict())
    model = made(7)
    zshard.load(tmp_path / "x", model)
    assert model[0].peaks.tolist() == [5, 5]
