"""The box "What bites" of docs/quick_start.md: its statements, on two ranks.

Process groups: tests/ranks/test_launchers.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nursery import fork_ranks
from spawn import RankPool, on_ranks, ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import zshard
from zshard import FSDP, ShardError

BATCHES = [torch.full((4, 64), 0.1 * (i + 1)) for i in range(3)]


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(dtype)


def count() -> tuple[int, int]:
    model = FSDP(build())
    return sum(p.numel() for p in model.parameters()), zshard.num_parameters(model)


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


def statistics(wrap: Any) -> torch.Tensor:
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    for _ in range(2):  # DDP broadcasts at the beginning of a forward
        model(torch.arange(32.0).view(4, 8) * (dist.get_rank() + 1)).sum().backward()
    return next(m for m in model.modules() if isinstance(m, nn.BatchNorm1d)).running_mean


def batch_norms() -> list[torch.Tensor]:
    synced = {"forward_sync_buffers": "training"}
    model = statistics(lambda m: FSDP(m, **synced))
    return [statistics(DistributedDataParallel), statistics(FSDP), model]


def norms(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    found = []
    for wrap in (DistributedDataParallel, FSDP):
        model = wrap(build(dtype))
        model(torch.randn(8, 64, dtype=dtype)).float().square().mean().backward()
        clip = torch.nn.utils.clip_grad_norm_
        found.append(clip(model.parameters(), 1.0).detach().clone())
        torch.manual_seed(0)
    return found[0], found[1]


@ranks(2)
def test_counts(pool: RankPool) -> None:
    own, full = zip(*pool.run(count), strict=True)
    total = sum(p.numel() for p in build().parameters())
    assert sum(own) == total and max(own) < total and full == (total, total)


@on_ranks(2)
def test_reductions():
    model = FSDP(build())
    model(BATCHES[0]).sum().backward()
    for reduce in (
        lambda p: p.norm(),
        lambda p: p.grad.norm(),
        lambda p: torch.isfinite(p.grad).all(),
    ):
        with pytest.raises(ShardError):
            reduce(next(model.parameters()))
    norms, plain = zshard.named_norms(model), build()
    assert norms.keys() == dict(plain.named_parameters()).keys()
    with pytest.raises(TypeError, match="cannot be pickled"):
        torch.save(model, "/dev/null")


@on_ranks(2)
def test_averages():
    for make in (copy.deepcopy, AveragedModel):
        plain, model = build(), FSDP(build())
        expected, found = average_of(plain, make(plain)), average_of(model, make(model))
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    before = copy.deepcopy(plain)
    with pytest.raises(ShardError, match="lerp_"):
        average_of(FSDP(build()), before)


@ranks(2)
def test_batch_norm(pool: RankPool) -> None:
    zero, one = pool.run(batch_norms)
    assert torch.equal(zero[0], zero[1]) and torch.equal(zero[0], zero[2])
    assert torch.equal(one[0], one[2]) and not torch.equal(one[0], one[1])


@on_ranks(2)
def test_clipping():
    torch.manual_seed(dist.get_rank())
    theirs, ours = norms(torch.float32)
    torch.testing.assert_close(ours, theirs, rtol=2**-22, atol=0)
    theirs, ours = norms(torch.bfloat16)
    assert theirs.dtype is torch.bfloat16 and ours.dtype is torch.float32
    assert abs(float(theirs) - float(ours)) <= 0.004 * float(ours)


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
