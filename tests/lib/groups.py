"""Process groups of tests, which end with the test; meshes, fake hosts, and a case to train on them.

Each gloo group has three threads, which poll a hundred times a second as long as it lives, and
ranks live for many tests (spawn.py).
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from models import CASES, loss_of, make, train
from torch.distributed.device_mesh import DeviceMesh

import zshard
from zshard import FSDP, api
from zshard.ranks import meeting, transports
from zshard.ranks.groups import resolve_groups

# Longer than a model's timeout: an error may delay a rank on its way to the next group.
PATIENCE = datetime.timedelta(seconds=60)

_kept: set[Any] = set()


@contextlib.contextmanager
def kept_groups() -> Iterator[None]:
    """Context manager: groups created within it outlive the task of a pool's ranks, for the next
    ones."""
    known = set(dist.distributed_c10d._world.pg_map)
    yield
    _kept.update(set(dist.distributed_c10d._world.pg_map) - known)


def end_groups_but(known: set[Any]) -> None:
    """End the groups that a task of a pool's ranks has left: each of gloo's has three threads that
    wake a hundred times a second. zshard's own groups for earlier ones stay."""
    groups = dist.distributed_c10d._world.pg_map
    zshards = [entry.created for entry in transports._connections if entry.group in known | _kept]
    for group in set(groups) - known - _kept - set().union(*zshards):
        dist.destroy_process_group(group)
    transports._drop_dead_entries()


@contextlib.contextmanager
def passing_groups() -> Iterator[None]:
    """Decorator or context manager that destroys the groups created within it: the test's, and
    zshard's for them."""
    known = set(dist.distributed_c10d._world.pg_map)
    try:
        yield
    finally:
        for group in set(dist.distributed_c10d._world.pg_map) - known:
            dist.destroy_process_group(group)


def comm_of_all(transport: str | None = None, timeout: float | None = None) -> Any:
    """Return the transport of all ranks; collective. Initializes torch.distributed if necessary."""
    groups = resolve_groups(None, None, zshard.ShardingStrategy.FULL_SHARD)
    return transports.comm_for(groups.world, transport, timeout)


def own_group() -> Any:
    """Return a group of all ranks, so that transports are new too: a test may leave them broken."""
    return dist.new_group(timeout=PATIENCE)


# --- meshes and fake hosts ------------------------------------------------------------------------


@functools.cache
def mesh_of(replicate: int, shard: int) -> DeviceMesh:
    """Return the mesh of all ranks of that shape, one per process; collective on first use."""
    with kept_groups():
        names = ("replicate", "shard")
        return dist.init_device_mesh("cpu", (replicate, shard), mesh_dim_names=names)


@contextlib.contextmanager
def on_hosts(per_host: int, name: str = "host") -> Iterator[None]:
    """Context manager in which the ranks appear to be on hosts with so many ranks each: host0, ..."""
    # Without a process group, a command of zshard makes one, and destroys it at its end.
    resolve_groups(None, None, zshard.ShardingStrategy.FULL_SHARD)
    host, known = meeting.host_id, list(transports._connections)
    meeting.host_id = api.host_id = lambda: f"{name}{dist.get_rank() // per_host}"
    transports._connections.clear()
    try:
        yield
    finally:
        meeting.host_id = api.host_id = host
        within = list(transports._connections)  # these sum in the order of hosts
        transports._connections.clear()
        transports._connections.extend(known)
        dist.barrier()
        for made in set().union(*(entry.created for entry in within)):
            dist.destroy_process_group(made)


@contextlib.contextmanager
def hosts_of(*sizes: int) -> Iterator[Any]:
    """Context manager with a new process group whose ranks are on hosts with so many ranks each."""
    names = [f"host {i}" for i, size in enumerate(sizes) for _ in range(size)]
    os.environ["ZSHARD_HOST"] = names[dist.get_rank()]
    known = list(transports._connections)
    transports._connections.clear()  # a transport of all ranks on one host would be found
    with passing_groups():
        try:
            yield dist.new_group(range(dist.get_world_size()))
        finally:
            del os.environ["ZSHARD_HOST"]
            transports._connections.clear()
            transports._connections.extend(known)
        dist.barrier()


def case_of(group: Any, name: str, **options: Any) -> Any:
    """Return the model of a case, sharded over a group."""
    case = CASES[name]
    options = {"process_group": group, "auto_wrap_policy": case.policy, "timeout": 60, **options}
    return FSDP(make(case.make), **options)


def curve(
    wire: Any, steps: int = 40, clip: float | None = None, precision: Any = None
) -> list[float]:
    """Return losses of steps of "net" on two hosts with two ranks each, means over the ranks."""
    case = CASES["net"]
    with hosts_of(2, 2) as group:
        model = case_of(group, "net", wire=wire, mixed_precision=precision)
        optimizer, losses = zshard.AdamW(model.parameters(), 3e-3), []
        for step in range(steps):
            loss = loss_of(model(case.batch(step % 4, dist.get_rank())))
            loss.backward()
            if clip is not None:
                model.clip_grad_norm_(clip)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        mean = torch.stack(losses)
        dist.all_reduce(mean)
    return (mean / 4).tolist()


def wrap(name: str, strategy: str, **options: Any) -> Any:
    """Return the model of a case, sharded; created with other values on each rank."""
    case = CASES[name]
    made = make(case.make, seed=1 + dist.get_rank())
    return FSDP(made, strategy=strategy, auto_wrap_policy=case.policy, **options)


def trained(model: Any, name: str) -> tuple[list[float], dict[str, Any]]:
    """Return the losses of a case's steps, and the final state."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = train(model, CASES[name], optimizer, dist.get_rank())
    return losses, model.state_dict()
