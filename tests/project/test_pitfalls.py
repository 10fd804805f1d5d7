"""docs/pitfalls.md, "Rank 0 alone": the calls that may be made
alone over shm, and those that end in PeerTimeoutError.

Its other statements: guard/test_situations.py, model/test_other_averages.py,
wrap/test_api.py (pickling), training/test_buffers.py, optim/test_clip.py, ranks/test_launchers.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from spawn import on_ranks
from torch import nn

import zshard


@pytest.mark.parametrize("name", ["state_dict", "save", "clip", "grad"])
@on_ranks(2, fresh=True)
def test_calls_on_rank_0_alone(name: str) -> None:
    dist.init_process_group("gloo")
    model = zshard.FSDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), timeout=1)
    model(torch.ones(4, 64)).sum().backward()
    calls = {
        "state_dict": model.state_dict,
        "save": lambda: zshard.save("/tmp/never", model),
        "clip": lambda: model.clip_grad_norm_(1.0),
        "grad": lambda: zshard.full_tensor(next(model.parameters()).grad),
    }
    dist.barrier()
    if dist.get_rank() == 0 and name == "state_dict":
        assert calls[name]()["0.weight"].shape == (64, 64)
    elif dist.get_rank() == 0:
        with pytest.raises(zshard.PeerTimeoutError):
            calls[name]()
    dist.barrier()
