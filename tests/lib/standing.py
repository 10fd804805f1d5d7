"""The ranks' side of a standing pool (spawn.py): forked by the nursery, they run one test's function after
another, with torch.distributed (gloo) initialised once."""

from __future__ import annotations

import datetime
import gc
import itertools
import os
import sys
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from groups import end_groups_but
from nursery import end_with_parent, show_stacks_when_asked
from tasks import answer

_tasks = itertools.count()  # of a pool's rank


def become(env: dict[str, str]) -> None:
    """Give this process the environment of its ranks, as if it had started in it."""
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    if "ZSHARD_CUDA_ON_HOST" in env:
        import fake_gpu  # its folder is in that PYTHONPATH

        fake_gpu.install()


def fork_ranks(client: Connection, pipes: list[int], folder: Path) -> None:
    """Fork a rank for each pipe and write when each ends; returns in a rank whose pipe has closed.

    Without its client, all end.
    """
    client.send(os.getpid())
    running = {}
    for rank, pipe in enumerate(pipes):
        pid = os.fork()
        if not pid:
            client.close()
            _become_rank(rank, [other for other in pipes if other != pipe], folder)
            _serve(Connection(pipe))
            return
        running[os.pidfd_open(pid)] = pid, rank
        _write_number(folder / f"rank{rank}.pid", pid)
    for pipe in pipes:
        os.close(pipe)
    while running:
        for end in wait([client, *running]):
            if end is client:
                os._exit(0)  # and the kernel ends the ranks
            pid, rank = running.pop(end)  # type: ignore[call-overload]
            status = os.waitpid(pid, 0)[1]
            _write_number(folder / f"rank{rank}.code", os.waitstatus_to_exitcode(status))


def _become_rank(rank: int, others: list[int], folder: Path) -> None:
    """Turn this forked process into a rank: its group, its output, its environment."""
    os.setsid()
    end_with_parent()
    for pipe in others:
        os.close(pipe)
    for descriptor, what in ((1, "out"), (2, "err")):
        with open(folder / f"rank{rank}.{what}", "ab") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    show_stacks_when_asked()


def _write_number(path: Path, number: int) -> None:
    """Write a number to a file atomically."""
    made = path.with_suffix(path.suffix + ".part")
    made.write_text(str(number))
    made.replace(path)


def _serve(pipe: Connection) -> None:
    """Initialize the process group once, then run tasks until the parent hangs up."""
    os.register_at_fork(after_in_child=pipe.close)  # else a forked worker hides this rank's death
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    while True:
        try:
            task = pipe.recv_bytes()
        except EOFError:
            dist.destroy_process_group()
            return
        torch.manual_seed(0)
        known, groups = len(sys.modules), set(dist.distributed_c10d._world.pg_map)
        answer(pipe, task)
        gc.collect()  # free one test's models and their shared memory before the next one
        _end_groups_but(groups)
        if len(sys.modules) > known:
            gc.freeze()  # else each collection scans all of torch again, for a tenth of a second


def _end_groups_but(known: set[Any]) -> None:
    """End the process groups that a task has created and left, once all ranks have finished it."""
    if not dist.is_initialized() or not known <= set(dist.distributed_c10d._world.pg_map):
        return  # the task has destroyed the pool's own group
    store, task = dist.distributed_c10d._get_default_store(), next(_tasks)
    if store.add(f"tests/through with {task}", 1) == dist.get_world_size():
        store.set(f"tests/all through with {task}", "")
    try:
        store.wait([f"tests/all through with {task}"], datetime.timedelta(seconds=20))
    except RuntimeError:  # a rank is stuck or dead: the pool ends
        return
    end_groups_but(known)
