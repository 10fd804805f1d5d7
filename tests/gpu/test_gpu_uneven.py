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
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpus import ADAM, DEEP, EXACT, TOGETHER, Start, far, on_host, sharded
from models import Case, loss_of
from nursery import fork_ranks
from spawn import RankPool
from stand_ins import environment
from torch import Tensor, nn

import zshard

Hosts = Callable[[int], RankPool]
together = pytest.mark.parametrize(("kind", "world", "backend"), TOGETHER)


def compare(start: Start, hosts: Hosts, place: tuple[str, int, str], task: Any, *args: Any) -> None:
    """Compare what a task returns on each rank, a dict of tensors, with the same on the host."""
    kind, world, backend = place
    ours = start(kind, world, backend).run(task, backend, *args)
    for mine, theirs in zip(ours, hosts(world).run(task, None, *args), strict=True):
        assert far(mine, theirs, EXACT if kind == "stand-in" else ADAM) == []


def results(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Return the model's full parameters and the optimizer's full state."""
    found = on_host(model.state_dict())
    for i, values in optimizer.state_dict()["state"].items():
        found |= {f"{name} of {i}": torch.as_tensor(v).cpu() for name, v in values.items()}
    return found


# --- join() ---------------------------------------------------------------------------------------

COUNTS = {2: [(4, 1), (0, 3)], 4: [(3, 2, 5, 4)]}


def joined(backend: str | None, strategy: str, counts: Any) -> dict[str, Tensor]:
    rank = dist.get_rank()
    model, there = sharded(DEEP, backend, strategy=strategy)
    optimizer, steps = zshard.AdamW(model.parameters(), lr=0.01), 0
    for x in model.join(DEEP.batch(step, rank).to(there) for step in range(counts[rank])):
        loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    assert steps == min(counts)
    return results(model, optimizer)


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
    return results(model, optimizer)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("how", ["usual", "evaluating", "raising"])
@together
def test_ranks_run_different_units(
    start: Start, hosts: Hosts, kind: str, world: int, backend: str, how: str, strategy: str
) -> None:
    compare(start, hosts, (kind, world, backend), with_other_units, how, strategy)


def without_being_asked() -> str:
    """The error over NCCL of ranks that do not meet before each transfer."""
    rank = dist.get_rank()
    model, there = sharded(PATHS, "nccl", process_group=dist.new_group())
    try:
        loss_of(model(PATHS.batch(0, rank).to(there), [rank])).backward()
    except zshard.DivergenceError as error:
        return str(error)
    return ""


def test_error_over_nccl_names_the_remedy(start: Start) -> None:
    for text in start("stand-in", 2, "nccl").run(without_being_asked):
        assert "parameters of unit 'layers.0'" in text and "parameters of unit 'layers.1'" in text
        assert "pass transport=zshard.NcclOptions(any_order=True)" in text


def killed(env: dict[str, str], backend: str) -> tuple[str, str]:
    """How a rank ends whose peer is killed before it leaves out a unit that this rank runs."""
    os.environ.update(env)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, there = sharded(PATHS, backend, any_order=True)
    x = PATHS.batch(0, rank).to(there)
    loss_of(model(x, [0, 1])).backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        loss_of(model(x, [0, 1, 2])).backward()
    except (RuntimeError, zshard.PeerError) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("backend", ["c10d", "nccl"])
def test_killed_rank_is_reported_at_the_next_meeting(backend: str) -> None:
    first, dead = fork_ranks(killed, 2, environment(backend), backend)
    assert dead.returncode == -signal.SIGKILL and first.value is not None, first.stderr
    kind, said = first.value
    assert kind == "PeerError" and "rank 1" in said and "all-gathering parameters" in said


# --- a rank that evaluates alone ------------------------------------------------------------------


def lone_evaluation(backend: str, any_order: bool) -> tuple[str, float]:
    """(this rank's error, how far its value is off) where rank 0 evaluates and the others train
    on."""
    rank = dist.get_rank()
    model, there = sharded(DEEP, backend, any_order, process_group=dist.new_group())
    x, off = DEEP.batch(0, rank).to(there), 0.0
    loss_of(model(x)).backward()
    try:
        loss = loss_of(model(x))
        if rank == 0:
            with torch.no_grad():
                off = float(loss_of(model(x))) - float(loss)
        loss.backward()
        loss_of(model(x)).backward()
    except zshard.DivergenceError as error:
        return str(error), off
    return "", off


@pytest.mark.sampled(3)
@pytest.mark.parametrize("any_order", [False, True])
@together
def test_lone_evaluation(
    start: Start, kind: str, world: int, backend: str, any_order: bool
) -> None:
    """Where hosts meet before each transfer, the others take part; else it is an error at once, with
    nothing queued."""
    found = start(kind, world, backend).run(lone_evaluation, backend, any_order)
    for said, off in found:
        assert off == 0.0
        if any_order or backend == "c10d":
            assert said == ""
        else:
            assert "called forward()" in said and "called backward()" in said
            assert "NcclOptions(any_order=True)" in said


def evaluates_while_others_wait(env: dict[str, str], backend: str) -> str:
    """What rank 0 gets where it evaluates while the others are in a collective of the script's; what
    rank 1 gets in its next forward, when rank 0 has exited."""
    os.environ.update(env)
    dist.init_process_group("gloo")
    processes = [None, None]
    dist.all_gather_object(processes, os.getpid())
    model, there = sharded(DEEP, backend, timeout=2.0)
    said = ""
    loss_of(model(DEEP.batch(0, 0).to(there))).backward()
    if dist.get_rank() == 0:
        try:
            with torch.no_grad():
                model(DEEP.batch(0, 0).to(there))
        except zshard.PeerTimeoutError as error:
            said = str(error)
    dist.barrier()
    if dist.get_rank() == 0:
        return said
    select.select([os.pidfd_open(processes[0])], [], [])  # until it has exited
    with pytest.raises(zshard.PeerError) as failed:
        loss_of(model(DEEP.batch(0, 0).to(there)))
    return str(failed.value)


@pytest.mark.parametrize("backend", ["c10d", "nccl"])
def test_lone_evaluation_while_others_are_elsewhere(backend: str) -> None:
    ranks = fork_ranks(evaluates_while_others_wait, 2, environment(backend), backend)
    said, later = (rank.value for rank in ranks)
    assert said is not None and later is not None, ranks[0].stderr + ranks[1].stderr
    assert "rank 1" in said and "not in a zshard collective" in said, said
    remedy = {"nccl": "NcclOptions(any_order=True)", "c10d": "an evaluation takes all ranks"}
    assert remedy[backend] in said
    assert "rank 0 timed out after 2.0 s" in later  # that it failed, and why
