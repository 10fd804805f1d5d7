"""The process groups of a model, from the arguments of FSDP(...).

Without torchrun the world size is 1 and there is no process group; with it, groups of the same
ranks are the same object. The group of a single rank is None.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from zshard._errors import warn
from zshard.ranks import ends
from zshard.ranks.agreement import gather_objects
from zshard.strategy import ShardingStrategy

Group = dist.ProcessGroup


@dataclass(frozen=True)
class Groups:
    """The process groups of a model. Equal ones are the same object."""

    world: Group | None  # all ranks
    shard_group: Group | None  # ranks that gather from each other
    replica_group: Group | None  # with secondary shards: ranks that have the same one

    def split(self, size: int) -> tuple[Group, Group]:
        """Return the block of `size` consecutive ranks that includes this one, and the ranks at its
        position in all such blocks; `size` divides the ranks. Collective on first use."""
        return _block(self.world, size), _column(self.world, size)


def resolve_groups(
    process_group: Group | tuple[Group, ...] | None, device_mesh: object, strategy: ShardingStrategy
) -> Groups:
    """Return the process groups that FSDP's arguments specify.

    process_group: one group; for a hybrid strategy a pair (shard group, replica group).
    device_mesh: instead of process_group, a 1-D mesh (shard) or a 2-D mesh (replicate, shard).
    strategy: a hybrid strategy given neither shards within each host (LOCAL_WORLD_SIZE ranks, as
        torchrun sets it).

    Creates the default process group (gloo) under torchrun if the script has not. Collective if a
    group has to be created. Raises ValueError for arguments that contradict each other, TypeError
    for arguments of the wrong type.
    """
    hybrid = strategy.is_hybrid
    if device_mesh is not None:
        if process_group is not None:
            raise ValueError("pass either process_group or device_mesh, not both")
        if not isinstance(device_mesh, DeviceMesh):
            raise TypeError(f"device_mesh must be a DeviceMesh of torch, got {device_mesh!r}")
        if device_mesh.ndim not in (1, 2):
            raise ValueError(
                f"device_mesh has {device_mesh.ndim} dimension(s): pass those to shard (replicate) "
                "over, such as mesh['dp']; zshard has no tensor or pipeline parallelism"
            )
        of_mesh = [device_mesh.get_group(at) for at in reversed(range(device_mesh.ndim))]
        process_group = tuple(of_mesh) if len(of_mesh) == 2 else of_mesh[0]
    if hybrid != isinstance(process_group, tuple) and process_group is not None:
        raise ValueError(
            "a hybrid strategy needs two groups, process_group=(shard, replica) or a 2-D mesh, and "
            "no other takes them: pass one dimension, mesh['dp']; zshard has no tensor parallelism"
        )
    if isinstance(process_group, tuple):
        return _resolve_pair(process_group)
    world = _resolve_one(process_group)
    if world is None:
        return Groups(None, None, None)
    if hybrid:
        return _split_by_host(world, strategy.has_secondary)
    shard_group = None if strategy is ShardingStrategy.ZERO1 else world
    return Groups(world, shard_group, world)


def _resolve_pair(pair: tuple[Group, ...]) -> Groups:
    """Return the groups of a mesh, from this rank's two groups of it. Collective."""
    if len(pair) != 2 or not all(isinstance(group, dist.ProcessGroup) for group in pair):
        raise TypeError(f"process_group must be a pair (shard, replica) of groups, got {pair!r}")
    shard, replicate = pair
    rows = gather_objects(dist.get_process_group_ranks(shard), replicate)
    ranks = sorted(rank for row in rows for rank in row)
    if len(set(ranks)) < len(ranks) or any(len(row) != len(rows[0]) for row in rows):
        raise ValueError(
            f"the process groups do not form a mesh: the shard groups are {rows}, but they must be "
            "of equal size and disjoint; pass device_mesh= instead"
        )
    world = dist.group.WORLD if len(ranks) == dist.get_world_size() else _subgroup(ranks)
    if dist.get_world_size(replicate) == 1:
        alone = _resolve_one(shard)
        return Groups(alone, alone, None)
    return Groups(world, _resolve_one(shard), replicate)


_subgroups: dict[tuple[int, ...], Group] = {}  # groups of some of a group's ranks, by these ranks


def _block(group: Group | None, size: int) -> Group:
    ranks = dist.get_process_group_ranks(group)
    first = dist.get_rank(group) // size * size
    return _subgroup(ranks[first : first + size])


def _column(group: Group | None, size: int) -> Group:
    return _subgroup(dist.get_process_group_ranks(group)[dist.get_rank(group) % size :: size])


def _subgroup(ranks: list[int]) -> Group:
    group = _subgroups.get(tuple(ranks))
    if group is None or group not in distributed_c10d._world.pg_map:
        group = _subgroups[tuple(ranks)] = new_subgroup(ranks)
    return group


def _split_by_host(world: Group, keeps: bool) -> Groups:
    all_ranks = dist.get_world_size(world)
    size = _env_int("LOCAL_WORLD_SIZE") or all_ranks
    if size >= all_ranks:
        return Groups(world, world, None)
    if all_ranks % size != 0:
        raise ValueError(
            f"world size {all_ranks} is not a multiple of LOCAL_WORLD_SIZE={size}: pass device_mesh"
        )
    shard_group = _block(world, size) if size > 1 else None
    return Groups(world, shard_group, _column(world, size) if keeps else None)


def _resolve_one(process_group: Group | None) -> Group | None:
    """Return the group to use for `process_group`; None for a single rank."""
    if process_group is not None:
        return process_group if dist.get_world_size(process_group) > 1 else None
    if not dist.is_available():
        return None
    if not dist.is_initialized():
        if not _launched():
            return None
        make_default_group("gloo")
    return dist.group.WORLD if dist.get_world_size() > 1 else None


_created: Counter[tuple[int, ...]] = Counter()  # by ranks


def new_subgroup(ranks: Sequence[int], backend: str | None = None) -> Group:
    """Return a new process group of these ranks of the world. Collective over them alone.

    backend: such as "gloo". None: the world's.

    Its ranks must choose the same name, one that no group has ever had, not even a destroyed one:
    the store keeps its ranks' addresses. torch derives the name from the number of groups that a
    rank is in, which differs between ranks and can fall; the number of groups that these ranks have
    created only rises.
    """
    key = tuple(sorted(ranks))
    _created[key] += 1
    text = f"zshard {'_'.join(map(str, key))} {_created[key]}"
    name = hashlib.sha256(text.encode()).hexdigest()
    usual = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        group: Group = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
    finally:
        distributed_c10d._hash_ranks_to_str = usual
    return group


def make_default_group(backend: str, alone: bool = False, **arguments: Any) -> None:
    """Create the default process group, which ends with the process. Collective. alone: of this
    rank, the only one; RuntimeError if it is one of several.

    After a restart by torchrun, the store still has the addresses of the processes before, and a
    rank may read one before the new process has replaced it. So each attempt has keys of its own.
    """
    if alone:
        _check_launcher()
        _say_alone()
        arguments |= {"store": HashStore(), "rank": 0, "world_size": 1}
    attempt = _env_int("TORCHELASTIC_RESTART_COUNT")
    if attempt and "store" not in arguments and "init_method" not in arguments:
        store, rank, world = next(rendezvous("env://"))
        store = distributed_c10d.PrefixStore(f"zshard/attempt {attempt}", store)
        arguments |= {"store": store, "rank": rank, "world_size": world}
    dist.init_process_group(backend, **arguments)
    # Runs after the end of the transports, which is registered later.
    atexit.register(_destroy_own_group, os.getpid())


def _launched() -> bool:
    """Return whether torchrun, or a similar launcher, started more than one rank. Raises
    RuntimeError under any other launcher, whose ranks would each train alone."""
    world, rank = _env_int("WORLD_SIZE"), _env_int("RANK")
    if world is None or rank is None:
        _check_launcher()
        _say_alone()
        return False
    if not 0 <= rank < world:
        raise ValueError(f"RANK={rank} is out of range for WORLD_SIZE={world}: use torchrun")
    return world > 1


_LAUNCHERS = (  # the variables of the rank and the number of ranks
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("RANK", "WORLD_SIZE"),
)


def _check_launcher() -> None:
    """Raise RuntimeError if SLURM or MPI started this process as one of several ranks, but no
    variable says how they connect."""
    for rank, world in _LAUNCHERS:
        size = _env_int(world)
        if size is None or (os.environ.get(rank) is None and world != "WORLD_SIZE"):
            continue
        if size > 1:
            raise RuntimeError(
                f"{world}={size}, but there is no process group: call init_process_group() first ("
                f"rank=int(os.environ['{rank}']), world_size={size}), use torchrun, or shard in a "
                f"trainer's configure_model(); for a single process, unset {world}"
            )
        return


@functools.cache  # once
def _say_alone() -> None:
    """Print a line. A process that mp.spawn or another multiprocessing call has started may be one
    of several ranks, which is worth a warning."""
    if multiprocessing.parent_process() is None:
        words = "1 rank: nothing is sharded; to use N ranks, start with torchrun --nproc-per-node N"
        print(f"zshard: {words}", file=sys.stderr, flush=True)
        return
    name = multiprocessing.current_process().name
    warn(
        f"process {name!r} of multiprocessing has no process group, so it trains alone: if it is "
        "one of several ranks, call torch.distributed.init_process_group() before FSDP()",
        RuntimeWarning,
    )


def check_still_alone(name: str) -> None:
    """Raise RuntimeError if there are other ranks by now that a model does not know."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"FSDP() of this {name} preceded init_process_group(), so each rank would train alone: "
            "initialize the process group first"
        )


def _env_int(name: str) -> int | None:
    text = os.environ.get(name)
    try:
        return int(text) if text else None
    except ValueError:
        raise ValueError(
            f"environment variable {name}={text!r} is not an integer: start the ranks with torchrun"
        ) from None


def _destroy_own_group(pid: int) -> None:
    """Destroy the process group before the interpreter exits: its threads may need Python.

    Skipped if a collective may still be running, since this would wait for it, and in a forked
    child of the process `pid`, which has neither its threads nor its sockets."""
    if not ends.has_failed() and dist.is_initialized() and os.getpid() == pid:
        dist.destroy_process_group()
