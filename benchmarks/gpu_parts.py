"""The parts of benchmarks/gpu.py beside steps: host time, AdamW, checkpoints, several GPUs.

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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
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
from benchmarks.harness import Spread
from benchmarks.models import TINY_BLOCKS, WORKLOADS

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


def _with_zshard(side: Any, path: str, what: str) -> Callable[[], Any]:
    """Load, save, or begin to save; return what waits for a save."""
    if what == "load":
        zshard.load(path, side.module, side.optimizer)
        return lambda: None
    return zshard.save(path, side.module, side.optimizer, asynchronous=what == "begin").wait


def _with_dcp(side: Any, path: str, what: str) -> Callable[[], Any]:
    model, optimizer = get_state_dict(side.module, side.optimizer)
    state: Any = {"model": model, "optimizer": optimizer}
    if what == "load":
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            side.module,
            side.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    elif what == "save":
        dcp.save(state, checkpoint_id=path)
    else:
        return dcp.async_save(state, checkpoint_id=path).result  # type: ignore[union-attr]
    return lambda: None


def saves(cell: Cell) -> Record:
    """Measure each library's checkpoints of one model, for one rank, on the disk of the system's
    temporary folder, with fsync; and steps beside an asynchronous save."""
    sides = {}
    for name, act in ((OURS, _with_zshard), (PEER, _with_dcp)):
        with tempfile.TemporaryDirectory(prefix="zshard-bench-") as folder:
            side = gpu_sides.build(name, workload_of(cell["model"], "small"))
            sides[name] = _of_side(side, partial(act, side), folder, cell["steps"])
        del side
        gpu_sides.forget()
    return {"title": f"Checkpoints of {cell['model']}, seconds", "sides": sides}


def _of_side(side: Any, act: Callable[..., Any], folder: str, least: int) -> dict[str, float]:
    (batch,) = batches_of(side.workload, 1)
    _seconds(lambda: [side.step(batch) for _ in range(2)])  # creates the state
    found = {"step": _seconds(lambda: [side.step(batch) for _ in range(least)]) / least}
    found["save"] = _seconds(lambda: act(f"{folder}/first", "save")())
    wanted = _sums(side)
    side.step(batch)
    for file in (file for file in Path(folder).rglob("*") if file.is_file()):
        with open(file, "rb") as opened:  # out of the page cache
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    found["load"] = _seconds(lambda: act(f"{folder}/first", "load"))
    if _sums(side) != wanted:
        raise AssertionError(f"{side.name} loaded different values than it saved")
    begin = time.perf_counter()
    waiting = threading.Thread(target=act(f"{folder}/second", "begin"))
    found["async: blocks"] = time.perf_counter() - begin
    waiting.start()
    steps = []
    while len(steps) < least or waiting.is_alive():
        steps.append(_seconds(lambda: side.step(batch)))
    waiting.join()
    found["async: all"] = time.perf_counter() - begin
    return {**found, "async: step beside": sum(steps) / len(steps)}


def _seconds(call: Callable[[], Any]) -> float:
    synchronize()
    begin = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - begin


def _sums(side: Any) -> list[float]:
    """Fingerprints of parameters and state; a second copy might not fit."""
    params = list(side.module.parameters())
    states = [side.optimizer.state[param] for param in params]
    tensors = [*params, *(s[key] for s in states for key in ("exp_avg", "exp_avg_sq"))]
    mine = [zshard.to_local(getattr(tensor, "_local_tensor", tensor)) for tensor in tensors]
    return [float(tensor.detach().sum(dtype=torch.float64)) for tensor in mine]


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
            model.reshard()  # which a root does not by itself

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
        sides[name] = {"ms": Spread.of([1e3 * s for s in seconds]).as_dict()}
        sides[name]["GB/s received"] = Spread.of([times * comes / s for s in seconds]).as_dict()
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
