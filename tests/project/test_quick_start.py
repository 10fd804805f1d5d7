"""The box "What bites" of docs/quick_start.md: its statements, on two ranks.

Process groups: tests/ranks/test_launchers.py, test_words_of_one_rank_alone.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import assert_same, differences
from nursery import fork_ranks
from spawn import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import zshard
from zshard import FSDP, ShardError

BATCHES = [torch.full((4, 64), 0.1 * (i + 1)) for i in range(3)]


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(dtype)


@on_ranks(2)
def test_counts() -> None:
    model, total = FSDP(build()), sum(p.numel() for p in build().parameters())
    assert sum(p.numel() for p in model.parameters()) < total == zshard.num_parameters(model)


@on_ranks(2)
def test_reductions_and_pickling_are_refused() -> None:
    model = FSDP(build())
    model(BATCHES[0]).sum().backward()
    param = next(model.parameters())
    for value, reduce in ((param, torch.norm), (param.grad, torch.norm), (param.grad, torch.all)):
        with pytest.raises(ShardError):
            reduce(value)
    assert zshard.named_norms(model).keys() == dict(build().named_parameters()).keys()
    with pytest.raises(TypeError, match="cannot be pickled"):
        torch.save(model, "/dev/null")


def average_of(model: nn.Module, average: Any) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in BATCHES:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if isinstance(average, AveragedModel):
            average.update_parameters(model)
        else:
            with torch.no_grad():
                for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(value, 0.1)
    return average.state_dict()


@on_ranks(2)
def test_averages() -> None:
    for make in (copy.deepcopy, AveragedModel):
        plain, model = build(), FSDP(build())
        expected = average_of(plain, make(plain))
        assert_same(average_of(model, make(model)), expected, make.__name__)
    with pytest.raises(ShardError, match="lerp_"):
        average_of(FSDP(build()), copy.deepcopy(plain))


def mean_of(wrap: Any, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), **options)
    for _ in range(2):  # DDP broadcasts at the beginning of a forward
        model(torch.arange(32.0).view(4, 8) * (dist.get_rank() + 1)).sum().backward()
    return next(m for m in model.modules() if isinstance(m, nn.BatchNorm1d)).running_mean


@on_ranks(2)
def test_batch_norm() -> None:
    ddp, own = mean_of(DistributedDataParallel), mean_of(FSDP)
    assert_same(mean_of(FSDP, forward_sync_buffers="training"), ddp, "the mean")
    assert (differences(own, ddp) == []) is (dist.get_rank() == 0)


@on_ranks(2)
def test_clipping() -> None:
    norms = {}
    for dtype in (torch.float32, torch.bfloat16):
        for wrap in (DistributedDataParallel, FSDP):
            model = wrap(build(dtype))
            torch.manual_seed(dist.get_rank())
            model(torch.randn(8, 64, dtype=dtype)).float().square().mean().backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norms[dtype, wrap] = norm.detach().clone()
    theirs, ours, theirs16, ours16 = norms.values()
    torch.testing.assert_close(ours, theirs, rtol=2**-22, atol=0)
    assert theirs16.dtype is torch.bfloat16 and ours16.dtype is torch.float32
    assert abs(float(theirs16) - float(ours16)) <= 0.004 * float(ours16)


def on_rank_0(name: str) -> None:
    dist.init_process_group("gloo")
    model = FSDP(build(), timeout=1)
    model(BATCHES[0]).sum().backward()
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


@pytest.mark.parametrize("name", ["state_dict", "save", "clip", "grad"])
def test_calls_on_rank_0_alone(name: str) -> None:
    fork_ranks(on_rank_0, 2, name, check=True)
