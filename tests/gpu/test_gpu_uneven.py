"""Ranks on GPUs that do different things: uneven numbers of batches, other units, a lone evaluation.

The reference is ranks on the host, over shm. With stand-ins the bits are equal, since these compute
as the host does.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpus import (
    BACKENDS,
    DEEP,
    FAKE,
    Hosts,
    Start,
    adamw,
    compare,
    full_state,
    on_device,
    on_fakes,
    run_fresh,
    sharded,
    together,
)
from models import Case, loss_of
from torch import Tensor, nn

import zshard

# --- join() ---------------------------------------------------------------------------------------

COUNTS = {2: [(4, 1), (0, 3)], 4: [(3, 2, 5, 4)]}


def joined(backend: str | None, strategy: str, counts: Any) -> dict[str, Tensor]:
    rank = dist.get_rank()
    model, there = sharded(DEEP, backend, strategy=strategy)
    optimizer, steps = adamw(model), 0
    for x in model.join(DEEP.batch(step, rank).to(there) for step in range(counts[rank])):
        loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    assert steps == min(counts)
    return full_state(model, optimizer)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "zero1", "no_shard"])
@together
def test_uneven_batches(
    start: Start, hosts: Hosts, kind: str, world: int, backend: str, strategy: str
) -> None:
    for counts in COUNTS[world]:
        compare(start, hosts, (kind, world, backend), joined, strategy, counts)


# --- units that a rank leaves out -----------------------------------------------------------------


class Paths(nn.Module):
    """Layers; each call runs those of `path`. The root has a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(5))
        self.scale = nn.Parameter(torch.ones(9))

    def forward(self, x: Tensor, path: list[int]) -> Tensor:
        for i in path:
            x = torch.tanh(self.layers[i](x))
        return x * self.scale


PATHS = Case(Paths, lambda generator: torch.randn(4, 9, generator=generator), {nn.Linear})


def path_of(rank: int, step: int) -> list[int]:
    draw = random.Random(1000 * step + rank)
    path = [i for i in range(5) if draw.random() < 0.6]
    if draw.random() < 0.3:
        draw.shuffle(path)
    return path * 2 if draw.random() < 0.2 else path


def with_other_units(backend: str | None, how: str, strategy: str) -> dict[str, Tensor]:
    rank = dist.get_rank()
    model, there = sharded(PATHS, backend, any_order=True, strategy=strategy)
    optimizer = zshard.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def output(step: int, path: list[int] | None = None) -> Tensor:
        x = PATHS.batch(step, rank).to(there)
        return model(x, path_of(rank, step) if path is None else path)

    for step in range(4):
        if how == "evaluating":
            with torch.no_grad():
                for i in range(1 + rank):
                    output(step + 90 + i)
        if how == "raising" and rank == step % dist.get_world_size():
            with contextlib.suppress(IndexError):
                output(step, [0, 2, 5])
        loss_of(output(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_state(model, optimizer)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("how", ["usual", "evaluating", "raising"])
@together
def test_ranks_run_different_units(
    start: Start, hosts: Hosts, kind: str, world: int, backend: str, how: str, strategy: str
) -> None:
    compare(start, hosts, (kind, world, backend), with_other_units, how, strategy)


@on_device(2, "nccl", kinds=FAKE)
def test_error_over_nccl_names_the_remedy() -> None:
    """Of ranks that do not meet before each transfer."""
    rank = dist.get_rank()
    model, there = sharded(PATHS, "nccl", process_group=dist.new_group())
    with pytest.raises(zshard.DivergenceError) as caught:
        model(PATHS.batch(0, rank).to(there), [rank])
    for words in (
        "unit 'layers.0'",
        "unit 'layers.1'",
        "pass transport=zshard.NcclOptions(any_order",
    ):
        assert words in str(caught.value)


def killed(backend: str) -> str:
    """How a rank ends whose peer is killed before it leaves out a unit that this rank runs."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, there = sharded(PATHS, backend, any_order=True)
    x = PATHS.batch(0, rank).to(there)
    loss_of(model(x, [0, 1])).backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(zshard.PeerError) as caught:
        loss_of(model(x, [0, 1, 2])).backward()
    return str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_killed_rank_is_reported_at_the_next_meeting(backend: str) -> None:
    first, dead = run_fresh("stand-in", 2, backend, killed, backend, check=False)
    assert dead.returncode == -signal.SIGKILL and first.value is not None, first.stderr
    assert "rank 1" in first.value and "all-gathering parameters" in first.value


# --- a rank that evaluates alone ------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("any_order", [False, True])
@together
@on_device()
def test_lone_evaluation(kind: str, world: int, backend: str, any_order: bool) -> None:
    """Rank 0 evaluates and the others train on. Where hosts meet before each transfer, the others
    take part; else it is an error at once, with nothing queued."""
    rank, off = dist.get_rank(), 0.0
    model, there = sharded(DEEP, backend, any_order, process_group=dist.new_group())
    x = DEEP.batch(0, rank).to(there)
    loss_of(model(x)).backward()
    ends = contextlib.nullcontext() if any_order or backend == "c10d" else alone_is_an_error()
    with ends:
        loss = loss_of(model(x))
        if rank == 0:
            with torch.no_grad():
                off = float(loss_of(model(x))) - float(loss)
        loss.backward()
        loss_of(model(x)).backward()
    assert off == 0.0


@contextlib.contextmanager
def alone_is_an_error() -> Iterator[None]:
    with pytest.raises(zshard.DivergenceError) as caught:
        yield
    for words in ("called forward()", "called backward()", "NcclOptions(any_order=True)"):
        assert words in str(caught.value)


def evaluates_while_others_wait(backend: str) -> str:
    """What rank 0 gets where it evaluates while the others are in a collective of the script's; what
    rank 1 gets in its next forward, when rank 0 has exited."""
    dist.init_process_group("gloo")
    processes = [None, None]
    dist.all_gather_object(processes, os.getpid())
    model, there = sharded(DEEP, backend, timeout=2.0)
    x = DEEP.batch(0, 0).to(there)
    loss_of(model(x)).backward()
    if dist.get_rank() == 0:
        with torch.no_grad(), pytest.raises(zshard.PeerTimeoutError) as failed:
            model(x)
        dist.barrier()
        return str(failed.value)
    dist.barrier()
    select.select([os.pidfd_open(processes[0])], [], [])  # until it has exited
    with pytest.raises(zshard.PeerError) as failed:
        model(x)
    return str(failed.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lone_evaluation_while_others_are_elsewhere(backend: str) -> None:
    said, later = on_fakes(evaluates_while_others_wait, 2, backend, backend=backend)
    assert "rank 1" in said and "not in a zshard collective" in said, said
    remedy = {
        "nccl": "NcclOptions(any_order=True)",
        "c10d": "all ranks must take part in an evaluation",
    }
    assert remedy[backend] in said
    assert "rank 0 timed out after 2.0 s" in later  # that it failed, and why
