"""NCCL with one rank, and several ranks on one GPU: their numbers are those of ranks on the host.

With fakes the bits are equal, since these compute as the host does; on a GPU the backends are
bit-identical to each other, and agree with the host within the tolerances of gpus.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpus import (
    ADAM,
    BACKENDS,
    BF16,
    BFLOAT16,
    DEEP,
    EXACT,
    FAKE,
    Hosts,
    Start,
    adamw,
    compare,
    far,
    is_real,
    on_device,
    on_host,
    sgd,
    sharded,
    together,
    train,
)
from models import CASES, loss_of
from scenarios import transport_of, unit_of
from torch import Tensor

import zshard
from zshard.memory import spare
from zshard.model import shard_model
from zshard.ranks import transports

MLP = CASES["mlp"]


@on_device(1, "nccl")
def test_nccl_with_one_rank() -> None:
    """A communicator of one rank: its facts, the bytes that come back, its broadcasts (of the
    host)."""
    where = "cuda:0" if is_real() else "cuda:0/host"
    comm = transports.connect_gpu(where, dist.group.WORLD, "nccl" if is_real() else "shm", 60.0)
    numbers = torch.arange(5.0)
    comm.broadcast(numbers, 0)
    assert (comm.transport, comm.exchange(b"here")) == ("nccl", [b"here"])
    assert numbers.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def train_together(backend: str | None, strategy: str, precision: Any) -> dict[str, Tensor]:
    """Return full parameters, and losses. The second step has two more micro-batches, within
    no_sync().

    SGD in bfloat16: there the sign of a gradient near 0 is rounding, and makes a whole step of
    Adam's.
    """
    rank = dist.get_rank()
    options = {"strategy": strategy, "mixed_precision": precision, "seed": 1 + rank}
    ours, there = sharded(MLP, backend, **options)
    assert backend is None or backend in transport_of(ours)
    optimizer = adamw(ours) if precision is None else sgd(ours)
    losses = []
    for step in range(3):
        with ours.no_sync():
            for micro in (10, 11) if step == 1 else ():
                loss_of(ours(MLP.batch(micro, rank).to(there))).backward()
        loss = loss_of(ours(MLP.batch(step, rank).to(there)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return on_host(ours.state_dict()) | {"losses": torch.tensor(losses)}


@pytest.mark.sampled(2)
@pytest.mark.needs_fma
@pytest.mark.parametrize("precision", [None, BFLOAT16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "zero1", "no_shard"])
@together
def test_ranks_that_share_a_gpu(
    start: Start,
    hosts: Hosts,
    kind: str,
    world: int,
    backend: str,
    strategy: str,
    precision: Any,
) -> None:
    near, place = ADAM if precision is None else BF16, (kind, world, backend)
    first, *others = compare(start, hosts, place, train_together, strategy, precision, near=near)
    for each in others:
        assert far(each, first | {"losses": each["losses"]}, EXACT) == []


@pytest.mark.parametrize("world", [2, 4])
def test_backends_agree_to_the_bit(start: Start, world: int) -> None:
    """One kernel sums on the GPU, in rank order, for both backends."""
    pools = [start("gpu", world, backend) for backend in BACKENDS]
    ranks = [
        pool.run(train_together, backend, "full_shard", None)
        for pool, backend in zip(pools, BACKENDS, strict=True)
    ]
    for ours, theirs in zip(*ranks, strict=True):
        assert far(ours, theirs, EXACT) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@together
@on_device()
def test_passes_give_their_memory_back(kind: str, world: int, backend: str, strategy: str) -> None:
    """Activations find it free."""
    model, there = sharded(MLP, backend, strategy=strategy)
    for number in range(2):
        model.zero_grad()
        zeroed = model.memory()
        loss = loss_of(model(MLP.batch(number, dist.get_rank()).to(there)))
        forward = model.memory()
        loss.backward()
        backward = model.memory()
    peak, predicted = model.memory("peak"), model.memory("predicted")
    assert zeroed["grads"] == zeroed["slots"] == zeroed["buckets"] == 0
    assert forward["grads"] == forward["buckets"] == 0
    assert (forward["slots"] > 0) == (strategy != "no_shard")  # what backward begins with
    assert backward["slots"] == backward["buckets"] == 0
    # Full gradients belong to the script.
    assert backward["grads"] == (0 if strategy == "no_shard" else predicted["grads"])
    for part in ("shards", "grads", "slots", "buckets"):
        assert peak[part] == predicted[part], part


@together
@on_device()
def test_step_skipped_by_one_rank_is_an_error(kind: str, world: int, backend: str) -> None:
    """All is well after a load."""
    rank = dist.get_rank()
    model, there = sharded(MLP, backend, process_group=dist.new_group())
    optimizer = adamw(model)
    train(model, optimizer, MLP, steps=1, rank=rank)
    saved = on_host(model.state_dict())
    loss_of(model(MLP.batch(1, rank).to(there))).backward()
    if rank > 0:
        optimizer.step()
    with pytest.raises(zshard.DivergenceError, match="out of step"):
        model(MLP.batch(2, rank).to(there))
    model.load_state_dict(saved)
    train(model, optimizer, MLP, steps=1, rank=rank)


# --- keep_gathered="auto": between hosts, units stay gathered where memory is left on all ranks ---------

Kept = tuple[list[int], dict[str, Tensor], int]


def train_kept(backend: str, **options: Any) -> Kept:
    """Return (bytes that stay after each step, parameters and losses, peak memory)."""
    model, _ = sharded(DEEP, backend, process_group=dist.new_group(), **options)
    optimizer, stays, losses = adamw(model), [], []
    for _ in range(4):
        losses += train(model, optimizer, steps=1, rank=dist.get_rank())
        stays.append(unit_of(model.module.blocks[0]).engine.gathered()[0])
    found = on_host(model.state_dict()) | {"losses": torch.tensor(losses)}
    return stays, found, int(model.memory("peak")["total"])


@pytest.mark.sampled(2)
@together
@on_device()
def test_auto_keeps_what_fits_on_all_ranks(kind: str, world: int, backend: str) -> None:
    """The ranks pretend that they are on several hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_model, "crosses_hosts", lambda comm: True)
        none, usual, peak = train_kept(backend, keep_gathered=False)
        most, ours, _ = train_kept(backend, memory_limit="1GiB")
        tight, least, _ = train_kept(backend, memory_limit=1 << 30 if dist.get_rank() else peak)
    assert none == [0] * 4 and most[0] == 0 and most[-1] > 0
    assert tight[-1] == 0
    assert far(ours, usual, EXACT) == [] and far(least, usual, EXACT) == []


@pytest.mark.parametrize("backend", BACKENDS)
@on_device(2, kinds=FAKE)
def test_nothing_stays_on_one_host(backend: str) -> None:
    assert train_kept(backend, memory_limit="1GiB")[0][-1] == 0


def test_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may use free memory and torch's; its peak is the memory that torch reserved."""
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
