"""The parts of benchmarks/gpu.py other than steps: host time, AdamW, checkpoints, several GPUs.

Each part takes its cell, a dict of plain values, and returns a title, and for each side its
numbers.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import zshard
from benchmarks import gpu_sides, harness, host_time
from benchmarks.gpu_sides import (
    OURS,
    PEER,
    batches_of,
    device,
    is_stand_in,
    synchronize,
    workload_of,
)
from benchmarks.gpu_steps import repeated
from benchmarks.harness import spread
from benchmarks.models import TINY_BLOCKS, WORKLOADS
from benchmarks.saves import Dcp, Saver, Zshard, drop

Cell = Mapping[str, Any]
Record = dict[str, Any]


def host(cell: Cell) -> Record:
    """Measure the host time that each library adds to a unit's forward and backward, with tensors
    so small that the GPU always waits for the host."""
    tiny = WORKLOADS["tiny32"]
    sides = {name: gpu_sides.build(name, tiny) for name in cell["sides"]}
    sides[host_time.PLAIN] = gpu_sides.build(gpu_sides.BASE, tiny)
    for side in sides.values():
        side.autocast = False
    (batch,) = batches_of(tiny, 1)
    turns = {
        name: host_time.turn_of(side, batch, cell["steps"], synchronize)
        for name, side in sides.items()
    }
    samples = harness.interleave(turns, cell["rounds"], cell["warmup"])
    found = {name: host_time.summarize(name, samples, 1) for name in cell["sides"]}
    title = f"Host: us added per unit, {TINY_BLOCKS} units"
    return {"title": title, "sides": {name: each["added_us"] for name, each in found.items()}}


# --- checkpoints ---------------------------------------------------------------------------------


def saves(cell: Cell) -> Record:
    """Measure each library's checkpoints of one model, for one rank, on the disk of the system's
    temporary folder, with fsync; and steps during an asynchronous save."""
    sides = {}
    for name, kind in ((OURS, Zshard), (PEER, Dcp)):
        with tempfile.TemporaryDirectory(prefix="zshard-bench-") as folder:
            side = gpu_sides.build(name, workload_of(cell["model"], "small"))
            saver = kind(side.module, side.optimizer)
            sides[name] = _of_side(side, saver, folder, cell["steps"])
        del side, saver
        gpu_sides.forget()
    return {"title": f"Checkpoints of {cell['model']}, seconds", "sides": sides}


def _of_side(side: Any, saver: Saver, folder: str, least: int) -> dict[str, float]:
    (batch,) = batches_of(side.workload, 1)
    _seconds(lambda: [side.step(batch) for _ in range(2)])  # creates the state
    found = {"step": _seconds(lambda: [side.step(batch) for _ in range(least)]) / least}
    found["save"] = _seconds(lambda: saver.save(f"{folder}/first")())
    wanted = _sums(saver)
    side.step(batch)
    drop(folder)
    found["load"] = _seconds(lambda: saver.load(f"{folder}/first"))
    if _sums(saver) != wanted:
        raise AssertionError(f"{side.name} loaded different values than it saved")
    saver.asynchronous = True
    begin = time.perf_counter()
    waiting = threading.Thread(target=saver.save(f"{folder}/second"))
    found["async: blocks"] = time.perf_counter() - begin
    waiting.start()
    steps = []
    while len(steps) < least or waiting.is_alive():
        steps.append(_seconds(lambda: side.step(batch)))
    waiting.join()
    found["async: all"] = time.perf_counter() - begin
    return {**found, "async: step beside": sum(steps) / len(steps)}


def _sums(saver: Saver) -> list[float]:
    """Fingerprints of parameters and state; a second copy might not fit."""
    return [float(tensor.sum(dtype=torch.float64)) for tensor in saver.own()]


def _seconds(call: Callable[[], Any]) -> float:
    synchronize()
    begin = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - begin


# --- several GPUs --------------------------------------------------------------------------------


class Bare(nn.Module):
    """One parameter, and next to no arithmetic; its gradient is a copy of one row."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, 1024, device=device()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def bandwidth(cell: Cell) -> Record:
    """Time torch's collectives, and zshard's and FSDP2's gather and reduction of one parameter."""
    world, x = dist.get_world_size(), torch.ones((), device=device())
    rows = cell["mib"] * 256 // world * world
    full = torch.zeros(rows * 1024, device=device())
    shard, received = full[: len(full) // world].clone(), torch.empty_like(full)
    mesh = dist.device_mesh.init_device_mesh(device().type, (world,))

    def gather(model: nn.Module) -> None:
        with torch.no_grad():
            model(x)
        if isinstance(model, FSDPModule):
            model.reshard()  # which a root does not do by default

    def gather_and_reduce(model: nn.Module) -> None:
        model(x).backward()
        model.zero_grad(set_to_none=True)

    calls: dict[str, tuple[Callable[[], Any], int]] = {  # how often others' part comes in
        "torch all-gather": (lambda: dist.all_gather_into_tensor(received, shard), 1),
        "torch reduce-scatter": (lambda: dist.reduce_scatter_tensor(shard, full), 1),
        "torch all-to-all": (lambda: dist.all_to_all_single(received, full), 1),
        "torch all-reduce": (lambda: dist.all_reduce(full), 2),
    }
    models = {OURS: zshard.FSDP(Bare(rows)), PEER: fully_shard(Bare(rows), mesh=mesh)}
    for name, model in models.items():
        calls[f"{name}: gather (forward)"] = (partial(gather, model), 1)
        calls[f"{name}: gather, gradient, reduction"] = (partial(gather_and_reduce, model), 2)
    turns = {name: repeated(call, cell["steps"]) for name, (call, _) in calls.items()}
    samples = harness.interleave(turns, cell["rounds"], cell["warmup"])
    comes = (world - 1) * shard.numel() * shard.element_size() / 1e9
    sides = {}
    for name, (_, times) in calls.items():
        seconds = [sample.times[0] for sample in samples[name]]
        sides[name] = {"ms": spread([1e3 * s for s in seconds])}
        sides[name]["GB/s received"] = spread([times * comes / s for s in seconds])
    return {"title": f"{cell['mib']} MiB unsharded, {world} ranks", "sides": sides}


def killed(cell: Cell) -> Record:
    """Return how each rank's child ended, whose last one was killed in training. Collective. The
    children are others than the ranks, as torchrun ends all of these where one is killed."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = harness.of_all_ranks(free.getsockname()[1])[0]  # of rank 0's host
    ours, theirs = multiprocessing.Pipe(duplex=False)
    spawn = multiprocessing.get_context("spawn")
    child = spawn.Process(target=_die, args=(cell["timeout"], port, theirs))
    child.start()
    theirs.close()
    end: Record = {"error": "killed", "words": "", "seconds": 0.0}
    with contextlib.suppress(EOFError):
        end = ours.recv()
    child.join()
    ends = harness.of_all_ranks(end)
    last = len(ends) - 1
    title = f"Rank {last} of {len(ends)}, killed in training, is reported by all"
    record: Record = {"title": title, "sides": {str(rank): end for rank, end in enumerate(ends)}}
    if not all(e["error"] == "PeerError" and f"rank {last}" in e["words"] for e in ends[:last]):
        record["failed"] = str(ends)
    return record


def _die(timeout: float, port: int, line: Any) -> None:
    """Train; the last rank is killed between a forward and its backward. The others send the error
    that ends it, and the seconds that it took to come."""
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    if not is_stand_in():
        torch.cuda.set_device(device())
    dist.init_process_group("gloo")
    workload = workload_of("tiny", "large")
    with torch.device(device()):
        module = workload.build()
    how = {"transport": "c10d"} if is_stand_in() else {}
    model: Any = zshard.FSDP(module, auto_wrap_policy=set(workload.units), timeout=timeout, **how)
    (batch,) = batches_of(workload, 1)
    workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
    loss = workload.loss(model, batch)
    begin = time.perf_counter()
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error, words = "nothing", ""
    try:
        loss.backward()  # type: ignore[no-untyped-call]
        float(workload.loss(model, batch))
    except Exception as raised:
        error, words = type(raised).__name__, str(raised)
    line.send({"error": error, "words": words, "seconds": time.perf_counter() - begin})
    line.close()
    os._exit(0)  # a process group without a rank may wait at exit
