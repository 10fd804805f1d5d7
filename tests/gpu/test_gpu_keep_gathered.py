"""keep_gathered="auto" on GPUs: between hosts, units stay gathered where memory is left on all ranks.

The ranks of a test pretend that they are on several hosts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpus import BACKENDS, DEEP, EXACT, TOGETHER, Start, far, sharded
from models import loss_of
from scenarios import unit_of

import zshard
from zshard.memory import spare
from zshard.model import shard_model

Kept = tuple[list[int], list[float], dict[str, torch.Tensor], int]


def trained(backend: str | None, **options: Any) -> Kept:
    """(bytes that stay after each step, losses, parameters, peak memory)."""
    real, shard_model.crosses_hosts = shard_model.crosses_hosts, lambda comm: True
    try:
        model, there = sharded(DEEP, backend, process_group=dist.new_group(), **options)
    finally:
        shard_model.crosses_hosts = real
    optimizer = zshard.AdamW(model.parameters(), lr=0.01)
    stays, losses = [], []
    for step in range(4):
        loss = loss_of(model(DEEP.batch(step, dist.get_rank()).to(there)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        stays.append(unit_of(model.module.blocks[0]).engine.gathered()[0])
    peak = int(model.memory("peak")["total"])
    return stays, losses, {name: v.cpu() for name, v in model.state_dict().items()}, peak


def settings(backend: str) -> tuple[Kept, Kept, Kept]:
    """With nothing, with all that fits, and where one rank has no memory left."""
    none = trained(backend, keep_gathered=False)
    most = trained(backend, memory_limit="1GiB")
    return none, most, trained(backend, memory_limit=1 << 30 if dist.get_rank() else none[3])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "world", "backend"), TOGETHER)
def test_auto_keeps_what_fits_on_all_ranks(
    start: Start, kind: str, world: int, backend: str
) -> None:
    found = start(kind, world, backend).run(settings, backend)
    for (none, *plain), (most, *ours), (tight, *least) in found:
        assert none == [0] * 4 and most[0] == 0 and most[-1] > 0
        assert tight[-1] == 0
        assert ours[0] == least[0] == plain[0]
        assert far(ours[1], plain[1], EXACT) == []


def on_one_host(backend: str) -> int:
    model, there = sharded(DEEP, backend, process_group=dist.new_group(), memory_limit="1GiB")
    optimizer = zshard.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        loss_of(model(DEEP.batch(step, 0).to(there))).backward()
        optimizer.step()
    return int(unit_of(model.module.blocks[0]).engine.gathered()[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_stays_on_one_host(start: Start, backend: str) -> None:
    assert start("stand-in", 2, backend).run(on_one_host, backend) == [0, 0]


def test_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may use what is free or torch's; what torch reserved is its peak."""
    gpu = torch.device("cuda", 0)

    class OnGpu(torch.nn.Module):
        def parameters(self, recurse: bool = True) -> Any:
            return iter([type("P", (), {"device": gpu})()])

    numbers = {"memory_reserved": 300, "memory_allocated": 200, "max_memory_reserved": 350}
    for name, number in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, number=number: number)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 2000))
    found = spare.Spare.__new__(spare.Spare)
    found._limit = "auto"
    assert found._left(OnGpu()) == 1000 - 350
