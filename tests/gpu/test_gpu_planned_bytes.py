"""The planner's bytes between ranks, compared with those that a run moves over the fake NCCL.

Ranks seem to be on two hosts. The fake sends each shard of a gather directly, so of a gather only
the sum can be compared; NCCL's ring decides where it comes from.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import gpu_log
import pytest
import torch
import torch.distributed as dist
from gpus import Start
from groups import mesh_of, on_hosts
from models import make
from torch import nn

import zshard
from zshard import FSDP, Wire
from zshard.extras.planner.gpus import DEVICES, Network
from zshard.extras.planner.prediction import predict
from zshard.extras.planner.traffic import Traffic
from zshard.extras.planner.ways import Cluster, Way
from zshard.extras.planner.workloads import Workload

WORLD, PER_HOST = 4, 2
WIDTH = 128  # shards are whole: the planner counts no padding
STRATEGIES = ("full_shard", "shard_grad_op", "zero1", "no_shard", "hybrid_shard", "hybrid_full")


class Adapted(nn.Module):
    """A frozen matrix, and a trained one if `trained`."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.beside = nn.Linear(WIDTH, WIDTH, bias=False) if trained else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.frozen(x) + self.beside(x)
        return out


def all_trained() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])


def partly_frozen() -> nn.Module:
    return nn.Sequential(Adapted(True), Adapted(True), Adapted(False))


MODELS = {"all trained": all_trained, "partly frozen": partly_frozen}


def received(folder: str, name: str, strategy: str, wire: str | None) -> dict[str, int]:
    """Return the bytes that a rank receives in a step: those gathered, and others from its host and
    from the other."""
    mesh = mesh_of(WORLD // PER_HOST, PER_HOST) if strategy.startswith("hybrid") else None
    options = {"strategy": strategy, "wire": wire, "device_mesh": mesh, "timeout": 60}
    options |= {"transport": "c10d", "keep_gathered": False}  # between the fakes' hosts
    with on_hosts(2):
        model = FSDP(make(MODELS[name]), **options)
        optimizer = zshard.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            with gpu_log.written(folder) if step == 3 else contextlib.nullcontext() as path:
                model(torch.ones(2, WIDTH)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        del model, optimizer
    return counted(path, dist.get_rank())


def counted(path: Path, rank: int) -> dict[str, int]:
    found = {"gathered": 0, "host": 0, "hosts": 0}
    for name, fields in gpu_log.read(path):
        if name != "transfer" or "dst" not in fields:
            continue
        peer, world, size = (int(fields[key]) for key in ("peer", "world", "bytes"))
        if fields["call"] == "AllGather":
            found["gathered"] += size * (world - 1) // world  # logged once for each rank
        elif peer != rank:
            found["host" if peer // PER_HOST == rank // PER_HOST else "hosts"] += size
    return found


def planned(name: str, strategy: str, wire: str | None) -> Traffic:
    """Return the planner's prediction."""

    def step(model: nn.Module, _: int) -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(2, WIDTH)).square().sum()
        return loss

    with torch.device("meta"):
        workload = Workload(MODELS[name](), step, 1, "samples")
    cluster = Cluster(DEVICES["h100"], WORLD, Network(450, 3200, PER_HOST))
    way = Way(strategy, precision="fp32", wire=Wire(wire, wire))
    return predict(workload, way, cluster).traffic


def gathered_across(name: str, strategy: str, gathered: int) -> float:
    """Return which of the gathered bytes come from the other host: of a ring one rank's of each
    host; of hybrid strategies only the copies' other halves, of trained parameters."""
    if not strategy.startswith("hybrid"):
        return gathered / PER_HOST
    trained = sum(4 * p.numel() for p in MODELS[name]().parameters() if p.requires_grad)
    return trained / WORLD if strategy == "hybrid_full" else 0.0


@pytest.mark.sampled(9)
@pytest.mark.parametrize("wire", [None, "bf16"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_are_those_of_a_run(
    start: Start, tmp_path: Path, strategy: str, name: str, wire: str | None
) -> None:
    ran = start("stand-in", WORLD, "nccl").run(received, str(tmp_path), name, strategy, wire)
    assert all(each == ran[0] for each in ran)
    gathered, host, hosts = ran[0].values()
    across = gathered_across(name, strategy, gathered)
    plan = planned(name, strategy, wire)
    assert plan == Traffic(gathered - across + host, across + hosts)
