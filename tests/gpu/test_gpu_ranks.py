"""NCCL with one rank, and several ranks on one GPU: their numbers are those of ranks on the host.

Ranks on the host over gloo are the reference for all ways of moving bytes between
ranks of a GPU. With stand-ins the bits are equal, since these compute as the host does; on a GPU the
backends agree with each other to the bit, and with the host within the tolerances of gpus.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpus import (
    ADAM,
    BACKENDS,
    BF16,
    BFLOAT16,
    EXACT,
    KINDS,
    Start,
    device,
    far,
    is_real,
    let_nccl_share_a_gpu,
    on_host,
    sgd,
    train,
    wrap,
)
from models import CASES, loss_of, make
from spawn import RankPool

import zshard
from zshard import FSDP
from zshard.ranks import transports


def alone_over_nccl() -> tuple[str, list[bytes], list[float]]:
    """A communicator of one rank: what it is, what comes back, what it broadcasts (of the host)."""
    where = "cuda:0" if is_real() else "cuda:0/host"
    comm = transports.connect_gpu(where, dist.group.WORLD, "nccl" if is_real() else "shm", 60.0)
    numbers = torch.arange(5.0)
    comm.broadcast(numbers, 0)
    return comm.transport, comm.exchange(b"here"), numbers.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_nccl_with_one_rank(start: Start, kind: str) -> None:
    pool = start(kind, 1, "nccl")
    if kind == "gpu" and not zshard.available_features()["nccl"]:
        pytest.skip(zshard.available_features()["missing"]["nccl"])
    transport, answers, numbers = pool.run(alone_over_nccl)[0]
    assert (transport, answers, numbers) == ("nccl", [b"here"], [0.0, 1.0, 2.0, 3.0, 4.0])


def optimizer_for(model: Any, precision: Any) -> Any:
    """SGD in bfloat16: there the sign of a gradient near 0 is rounding, and makes a whole step of
    Adam's."""
    return zshard.AdamW(model.parameters(), lr=0.01) if precision is None else sgd(model, zshard)


def train_together(backend: str | None, strategy: str, precision: Any) -> Any:
    """(transport, losses, state) of ranks that share the device, or the host where backend is None.
    The second step has two more micro-batches, within no_sync().

    The transport is "refused: ..." where NCCL does not let ranks share a GPU.
    """
    rank = dist.get_rank()
    case = CASES["mlp"]
    if backend == "nccl":
        let_nccl_share_a_gpu(rank)
    by = backend if backend and is_real() else "c10d"
    model = make(case.make, seed=1 + rank)
    try:
        ours = FSDP(
            model if backend is None else model.to(device()),
            strategy=strategy,
            mixed_precision=precision,
            transport=by,
            auto_wrap_policy=case.policy,
            timeout=60,
        )
        optimizer = optimizer_for(ours, precision)
        there = next(ours.parameters()).device
        losses = []
        for step in range(3):
            with ours.no_sync():
                for micro in (10, 11) if step == 1 else ():
                    loss_of(ours(case.batch(micro, rank).to(there))).backward()
            loss = loss_of(ours(case.batch(step, rank).to(there)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        transport = zshard.fsdp.state_of(ours).comms.all.transport
        return transport, losses, on_host(ours.state_dict())
    except zshard.NcclError as error:
        if "uplicate GPU" not in str(error) and "invalid usage" not in str(error).lower():
            raise
        return f"refused: {error}", [], {}


@pytest.fixture(scope="module")
def reference(hosts: Callable[[int], RankPool]) -> Callable[..., list[Any]]:
    """What ranks on the host get, over gloo: the same for all ways of being together on a GPU."""

    @functools.cache
    def found(world: int, strategy: str, precision: Any) -> list[Any]:
        return hosts(world).run(train_together, None, strategy, precision)

    return found


TOGETHER = [("stand-in", 2, backend) for backend in BACKENDS]
TOGETHER += [("gpu", world, backend) for world in (2, 4) for backend in BACKENDS]


@pytest.mark.sampled(2)
@pytest.mark.needs_fma
@pytest.mark.parametrize("precision", [None, BFLOAT16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "zero1", "no_shard"])
@pytest.mark.parametrize(("kind", "world", "backend"), TOGETHER)
def test_ranks_that_share_a_gpu(
    start: Start,
    reference: Callable[..., list[Any]],
    kind: str,
    world: int,
    backend: str,
    strategy: str,
    precision: Any,
) -> None:
    together = start(kind, world, backend).run(train_together, backend, strategy, precision)
    if together[0][0].startswith("refused"):
        pytest.skip(together[0][0])
    near = EXACT if kind == "stand-in" else ADAM if precision is None else BF16
    for ours, theirs in zip(together, reference(world, strategy, precision), strict=True):
        assert backend in ours[0] and theirs[0] == "c10d"
        assert ours[1] == pytest.approx(theirs[1], **near)
        assert far(ours[2], theirs[2], near) == []
        assert far(ours[2], together[0][2], EXACT) == []  # ranks agree to the bit


def held_between_passes(backend: str, strategy: str) -> list[dict[str, int]]:
    """memory() after zero_grad(), between forward and backward, after backward, and at its peak;
    and what was predicted."""
    case, rank = CASES["mlp"], dist.get_rank()
    if backend == "nccl":
        let_nccl_share_a_gpu(rank)
    model = FSDP(
        make(case.make).to(device()),
        strategy=strategy,
        transport=backend if is_real() else "c10d",
        auto_wrap_policy=case.policy,
        timeout=60,
    )
    found: list[dict[str, int]] = []
    for number in range(2):
        model.zero_grad()
        found.append(model.memory())
        loss = loss_of(model(case.batch(number, rank).to(device())))
        found.append(model.memory())
        loss.backward()
        found.append(model.memory())
    return [*found[3:], model.memory("peak"), model.memory("predicted")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize(("kind", "world", "backend"), TOGETHER)
def test_passes_give_their_memory_back(
    start: Start, kind: str, world: int, backend: str, strategy: str
) -> None:
    """Activations find it free."""
    for zeroed, forward, backward, peak, predicted in start(kind, world, backend).run(
        held_between_passes, backend, strategy
    ):
        assert zeroed["grads"] == zeroed["slots"] == zeroed["buckets"] == 0
        assert forward["grads"] == forward["buckets"] == 0
        assert (forward["slots"] > 0) == (strategy != "no_shard")  # what backward begins with
        assert backward["slots"] == backward["buckets"] == 0
        # Full gradients belong to the script.
        assert backward["grads"] == (0 if strategy == "no_shard" else predicted["grads"])
        for part in ("shards", "grads", "slots", "buckets"):
            assert peak[part] == predicted[part], part


def leave_out_a_step(backend: str) -> tuple[str, bool]:
    """What a forward raises after rank 0 alone has left out a step; is all well after a load?"""
    rank = dist.get_rank()
    if backend == "nccl":
        let_nccl_share_a_gpu(rank)
    group = dist.new_group()
    case = CASES["mlp"]
    model = wrap(case, transport=backend if is_real() else "c10d", process_group=group, timeout=60)
    optimizer = zshard.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, case, steps=1, rank=rank)
    saved = on_host(model.state_dict())
    loss_of(model(case.batch(1, rank).to(device()))).backward()
    if rank > 0:
        optimizer.step()
    said = ""
    try:
        model(case.batch(2, rank).to(device()))
    except zshard.DivergenceError as error:
        said = str(error)
    model.load_state_dict(saved)
    train(model, optimizer, case, steps=1, rank=rank)
    return said, True


@pytest.mark.parametrize(("kind", "world", "backend"), TOGETHER)
def test_step_skipped_by_one_rank_is_an_error(
    start: Start, kind: str, world: int, backend: str
) -> None:
    for said, trained in start(kind, world, backend).run(leave_out_a_step, backend):
        assert "out of step" in said and trained


@pytest.mark.parametrize("world", [2, 4])
def test_backends_agree_to_the_bit(start: Start, world: int) -> None:
    """What sums on the GPU is one kernel, in rank order, whoever brings the numbers."""
    pool = start("gpu", world)
    found = [pool.run(train_together, backend, "full_shard", None) for backend in BACKENDS]
    found = [each for each in found if not each[0][0].startswith("refused")]
    for each in found[1:]:
        for ours, first in zip(each, found[0], strict=True):
            assert ours[1] == first[1]
            assert far(ours[2], first[2], EXACT) == []
