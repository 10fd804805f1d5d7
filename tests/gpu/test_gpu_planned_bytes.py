"""The planner's bytes between ranks beside those that the fake NCCL moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpu_log
import pytest
import torch
import torch.distributed as dist
from gpus import Start
from groups import mesh_of, on_two_hosts
from models import make
from torch import nn

import zshard
from zshard import FSDP

WORLD, PER_HOST = 4, 2
WIDTH = 128  # shards are whole: the planner counts no padding


def make_model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])


def counted(folder: str, strategy: str, wire: str | None) -> Any:
    """Return the bytes that a rank receives in a step: gathered; otherwise, from its host and from
    the other."""
    rank = dist.get_rank()
    mesh = mesh_of(WORLD // PER_HOST, PER_HOST) if strategy.startswith("hybrid") else None
    with on_two_hosts():
        model = FSDP(
            make(make_model),
            strategy=strategy,
            wire=wire,
            device_mesh=mesh,
            transport="c10d",
            keep_gathered=False,
            timeout=60,
        )
        optimizer = zshard.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            log = gpu_log.start(folder, rank) if step == 3 else None
            model(torch.ones(2, WIDTH)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        gpu_log.stop()
        del model, optimizer
    lines = [f for name, f in gpu_log.read(Path(str(log))) if name == "transfer" and "dst" in f]
    found: dict[str, int] = {}
    for f in lines:
        key = f"{f['call']} w{f['world']} p{f['peer']}"
        found[key] = found.get(key, 0) + int(f["bytes"])
    return found


@pytest.mark.parametrize("wire", [None, "int8"])
@pytest.mark.parametrize("strategy", ["full_shard", "zero1", "no_shard", "hybrid_shard", "hybrid_full"])
def test_x(start: Start, tmp_path: Path, strategy: str, wire) -> None:
    found = start("stand-in", WORLD, "nccl").run(counted, str(tmp_path), strategy, wire)
    for f in found:
        print(strategy, f)
