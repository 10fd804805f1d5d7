"""Several GPUs: bandwidth of gathers and reductions, and what the other ranks say of a killed one.

Ranks have a GPU each, on one host or on several. Over fakes (tests/lib/stand_ins.py) only the
program is checked. The steps of several GPUs are the part steps of gpu.py.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import zshard
from benchmarks import harness
from benchmarks.gpu_sides import device, is_stand_in, workload_of
from benchmarks.gpu_steps import repeated
from benchmarks.harness import Spread


class Bare(nn.Module):
    """One parameter, and next to no arithmetic; its gradient is a copy of one row."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, 1024, device=device()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def bandwidth(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Time torch's collectives, and zshard's and FSDP2's gather and reduction of one parameter.

    cell: "mib" (of the unsharded parameter, float32), "steps" (in a turn), "rounds", "warmup".
    """
    world, rows = dist.get_world_size(), cell["mib"] * 256
    rows -= rows % world
    full = torch.zeros(rows * 1024, device=device())
    shard, received = full[: len(full) // world].clone(), torch.empty_like(full)
    calls: dict[str, Callable[[], Any]] = {
        "torch all-gather": lambda: dist.all_gather_into_tensor(received, shard),
        "torch reduce-scatter": lambda: dist.reduce_scatter_tensor(shard, full),
        "torch all-to-all": lambda: dist.all_to_all_single(received, full),
        "torch all-reduce": lambda: dist.all_reduce(full),
    }
    for name, model in (("zshard", zshard.FSDP(Bare(rows))), ("fsdp2", _fsdp2(rows))):
        calls[f"{name}: gather (forward)"] = _forward(model)
        calls[f"{name}: gather, gradient, reduction"] = _forward_and_backward(model)
    turns = {name: repeated(call, cell["steps"]) for name, call in calls.items()}
    samples = harness.interleave(turns, cell["rounds"], cell["warmup"])
    received_bytes = (world - 1) * shard.numel() * shard.element_size()
    times = {name: [s.times[0] for s in samples[name]] for name in calls}
    return {
        "part": "bandwidth",
        "ranks": world,
        "mib": cell["mib"],
        "sides": {
            name: {
                "ms": Spread.of([t * 1e3 for t in times[name]]).as_dict(),
                "gb_per_s": Spread.of(
                    [_moves(name) * received_bytes / t / 1e9 for t in times[name]]
                ).as_dict(),
            }
            for name in calls
        },
    }


def _moves(name: str) -> int:
    """How often the other ranks' part of the parameter comes in."""
    return 2 if name.endswith(("all-reduce", "reduction")) else 1


def _fsdp2(rows: int) -> nn.Module:
    mesh = dist.device_mesh.init_device_mesh(device().type, (dist.get_world_size(),))
    return fully_shard(Bare(rows), mesh=mesh)


def _forward(model: nn.Module) -> Callable[[], Any]:
    def call() -> None:
        with torch.no_grad():
            model(x)
        if isinstance(model, torch.distributed.fsdp.FSDPModule):
            model.reshard()  # which a root does not by itself

    x = torch.ones((), device=device())
    return call


def _forward_and_backward(model: nn.Module) -> Callable[[], Any]:
    def call() -> None:
        model(x).backward()
        model.zero_grad(set_to_none=True)

    x = torch.ones((), device=device())
    return call


# --------------------------------------------------------------------------------------
# A killed rank


def killed(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Return how each rank's child ended, whose last one was killed in training. Collective.

    cell: "timeout".
    """
    with socket.socket() as free:
        free.bind(("", 0))
        port = harness.of_all_ranks(free.getsockname()[1])[0]
    ends = harness.of_all_ranks(_end_of_child(cell, port))
    last = len(ends) - 1
    found = {"part": "killed", "ranks": len(ends), "killed": last, "ends": ends}
    if all(error == "PeerError" and f"rank {last}" in words for error, words, _ in ends[:last]):
        return found
    return {**found, "failed": str(ends), "cell": dict(cell)}


def _end_of_child(cell: Mapping[str, Any], port: int) -> tuple[str, str, float]:
    """Train in a child, one for each rank, as torchrun ends all ranks where one is killed; return
    the error that ends it, its words, and the seconds that it took to come. The children meet at
    `port` of rank 0's host."""
    with tempfile.TemporaryDirectory(prefix="zshard-bench-") as folder:
        out = Path(folder) / "end.json"
        inner = json.dumps({**cell, "killed": True})
        command = [sys.executable, "-m", "benchmarks.gpu", "--cell", inner, f"--out={out}"]
        env = {**os.environ, "MASTER_PORT": str(port), "END": str(out)}
        env["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        done = subprocess.run(command, env=env, timeout=300)
        if not out.exists():
            return f"exit status {done.returncode}", "", 0.0
        error, words, seconds = json.loads(out.read_text())
        return error, words, seconds


def die(cell: Mapping[str, Any]) -> None:
    """Train; the last rank is killed between a forward and its backward."""
    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    workload = workload_of("tiny", "large")
    with torch.device(device()):
        module = workload.build()
    how = {"transport": "c10d"} if is_stand_in() else {}
    model: Any = zshard.FSDP(
        module, auto_wrap_policy=set(workload.units), timeout=cell["timeout"], **how
    )
    batch = tuple(t.to(device()) for t in workload.batch(torch.Generator().manual_seed(rank)))
    workload.loss(model, batch).backward()  # type: ignore[arg-type, no-untyped-call]
    loss = workload.loss(model, batch)  # type: ignore[arg-type]
    begin = time.perf_counter()
    if rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    end = ("nothing", "")
    try:
        loss.backward()  # type: ignore[no-untyped-call]
        float(workload.loss(model, batch))  # type: ignore[arg-type]
    except Exception as error:
        end = (type(error).__name__, str(error))
    harness.write_json(Path(os.environ["END"]), [*end, time.perf_counter() - begin])
    os._exit(0)  # a process group without a rank may wait at exit
