"""A rank's part of saves.py: the cases wrap, set-up, loading and offload."""

from __future__ import annotations

import gc
import json
import mmap
import os
import resource
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import zshard
from benchmarks import harness
from benchmarks.harness import MIB, Numbers
from benchmarks.memory import PssSampler, high_water, pss, reset_high_water, trim
from benchmarks.models import WORKLOADS, GPTBlock, TinyBlock
from benchmarks.sides import SEED, by_fsdp1, by_fsdp2, by_zshard

# --- set-up and loading: a rank's part ------------------------------------------------------------

SIZES = {"gpt355m": (24, 1024, 50257, 1024), "tiny": (2, 64, 100, 32)}
UNITS = {GPTBlock}


def build(size: str) -> nn.Module:
    """Build a GPT-2, whose head is the embedding's weight; no forward is run."""
    layers, width, vocabulary, seq = SIZES[size]
    blocks = [GPTBlock(width, width // 64) for _ in range(layers)]
    embeddings = nn.Embedding(vocabulary, width), nn.Embedding(seq, width)
    return nn.Sequential(*embeddings, *blocks, nn.LayerNorm(width))


def on_meta(size: str) -> nn.Module:
    with torch.device("meta"):
        return build(size)


def fsdp2_blank(size: str) -> nn.Module:
    return by_fsdp2(on_meta(size), UNITS).to_empty(device="cpu")


def fsdp2_from_meta(size: str) -> nn.Module:
    """Like torchtitan: shard on meta, allocate, then initialize the local shards."""
    module = fsdp2_blank(size)
    with torch.no_grad():
        for child in module.modules():
            if hasattr(child, "reset_parameters"):
                child.reset_parameters()
    return module


def zshard_blank(size: str) -> Any:
    return by_zshard(on_meta(size), UNITS, param_init_fn=zshard.uninitialized)


def zshard_from_rank0(model: Any, path: str) -> None:
    state = load_file(path) if dist.get_rank() == 0 else None
    zshard.load_state_dict(model, state, from_rank0=True)


def fsdp2_load(model: nn.Module, path: str, from_rank0: bool) -> None:
    state = load_file(path) if not from_rank0 or dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank0)
    set_model_state_dict(model, state, options=options)


Make, Load = Callable[[str], Any], Callable[[Any, str], Any]
SETUPS: dict[str, tuple[Make, None]] = {
    "plain": (build, None),
    "zshard-meta": (lambda size: by_zshard(on_meta(size), UNITS), None),
    "zshard-real": (lambda size: by_zshard(build(size), UNITS), None),
    "fsdp1-meta": (lambda size: by_fsdp1(on_meta(size), UNITS), None),
    "fsdp2-meta": (fsdp2_from_meta, None),
    "fsdp2-real": (lambda size: by_fsdp2(build(size), UNITS), None),
}
"""Functions that build a sharded model with random values. plain is unsharded: the lower bound."""

LOADS: dict[str, tuple[Make, Load]] = {
    "zshard-load": (zshard_blank, lambda model, path: zshard.load(path, model)),
    "zshard-load-from-rank0": (zshard_blank, zshard_from_rank0),
    "zshard-load-each": (zshard_blank, lambda model, path: model.load_state_dict(load_file(path))),
    "fsdp2-load-from-rank0": (fsdp2_blank, partial(fsdp2_load, from_rank0=True)),
    "fsdp2-load-each": (fsdp2_blank, partial(fsdp2_load, from_rank0=False)),
}
"""Functions that build a model without values, and load it from a file. each: every rank reads the
full file into memory and keeps its shard; from-rank0: rank 0 reads it and sends the shards."""


def alone(model: str, side: str, number: int, folder: str) -> Numbers:
    """Return seconds and bytes beyond those held before; in the first round the peak without mapped
    files, which takes samples, instead."""
    make, load = {**SETUPS, **LOADS}[side]
    with torch.random.fork_rng():
        make("tiny")  # once per process: groups, arenas
    torch.manual_seed(SEED)
    made = make(model) if load else None
    for param in made.parameters() if load else ():
        getattr(param, "_local_tensor", param).detach().fill_(0.5)  # touches all pages
    trim()
    dist.barrier()
    reset_high_water()
    before, sampler = (high_water(), None) if number else (pss(), PssSampler())
    start, busy = time.perf_counter(), time.process_time()
    if load:
        load(made, f"{folder}/model.safetensors")
    else:
        made = make(model)
    dist.barrier()
    found = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - busy}
    if sampler:
        return harness.slowest({"peak_bytes": sampler.stop() - before})
    found["peak_rss_bytes"] = high_water() - before
    trim()
    reset_high_water()
    found["kept_rss_bytes"] = high_water() - before
    return harness.slowest(found)


# --- wrap: a rank's part --------------------------------------------------------------------------

WRAPS: dict[str, Callable[..., Any]] = {
    "FSDP": by_zshard,
    "fully_shard": by_fsdp2,
    "DDP": lambda module, units: nn.parallel.DistributedDataParallel(module),
}
LATER = 5


def wrapped(model: str, side: str, number: int, folder: str) -> Numbers:
    """Return the seconds of a process's first call, and the median of later ones."""
    seconds = []
    for _ in range(1 + LATER):
        torch.manual_seed(SEED)
        if model.isdigit():
            module, units = nn.Sequential(*(TinyBlock(16) for _ in range(int(model)))), {TinyBlock}
        else:
            module, units = WORKLOADS[model].build(), {*WORKLOADS[model].units}
        gc.collect()
        dist.barrier()
        start = time.perf_counter()
        made = WRAPS[side](module, units)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        del made, module
    return harness.slowest({"first": seconds[0], "later": statistics.median(seconds[1:])})


# --- offload: a rank's part -----------------------------------------------------------------------

LIMIT, CACHE = 1500 * MIB, 160 * MIB
"""Bytes of all ranks without a cgroup, where mapped files do not count; Offload(cache=) of each."""

LEARNED, OFFLOAD_STEPS = 2, 6
"""The first step creates the optimizer state, the second records the access order: both untimed."""

BLOCK = 16 * MIB


def offload(model: str, side: str, number: int, folder: str, cgroup: str | None) -> Numbers:
    """Train with the optimizer in backward; return seconds and bytes per step, and the last loss.
    The side "raw" moves the bytes of the disk's step instead."""
    if side == "raw":
        return move(folder, json.loads(Path(folder, "moved").read_text()))
    if side == "disk" and cgroup:
        Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))
    elif side == "disk":
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT // dist.get_world_size(),) * 2)
    workload = WORKLOADS[model]
    with torch.device("meta"):
        plain = workload.build()
    torch.manual_seed(SEED)
    where = zshard.Offload(directory=folder, cache=CACHE) if side == "disk" else None
    module = by_zshard(plain, workload.units, param_init_fn=init, offload=where)
    module.optimizer_in_backward(zshard.AdamW(module.parameters(), lr=workload.lr))
    generator, times = harness.generator(), []
    for step in range(OFFLOAD_STEPS):
        if step == LEARNED:
            before = moved_bytes()
        batch = workload.batch(generator)
        dist.barrier()
        start = time.perf_counter()
        loss = workload.loss(module, batch)
        loss.backward()
        times.append(time.perf_counter() - start)
    moved = (moved_bytes() - before) // (OFFLOAD_STEPS - LEARNED)
    dist.all_reduce(moved)
    if side == "disk" and dist.get_rank() == 0:
        Path(folder, "moved").write_text(json.dumps(moved.tolist()))
    found = {"seconds": statistics.median(times[LEARNED:]), "last_loss": loss.item()}
    found |= {"read_bytes": moved[0].item(), "write_bytes": moved[1].item()}
    found["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return harness.slowest(found)


def init(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        if param.dim() > 1:
            nn.init.kaiming_normal_(param, nonlinearity="relu")
        else:
            nn.init.constant_(param, 0.1)


def moved_bytes() -> Tensor:
    """Return the bytes that this process has read from and written to storage."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return torch.tensor([int(counts["read_bytes"]), int(counts["write_bytes"])])


def move(folder: str, moved: Sequence[int]) -> Numbers:
    """Read and write that many bytes of this rank's file at the same time."""
    read, write = (count // dist.get_world_size() for count in moved)
    fd = os.open(path := f"{folder}/raw-{os.getpid()}", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.unlink(path)
    transfer(fd, max(read, write, BLOCK), os.pwritev)  # so that reads hit the disk
    threads = [threading.Thread(target=transfer, args=(fd, read, os.preadv))]
    threads.append(threading.Thread(target=transfer, args=(fd, write, os.pwritev)))
    dist.barrier()
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return harness.slowest({"seconds": time.perf_counter() - start})


def transfer(fd: int, count: int, act: Callable[..., int]) -> None:
    with mmap.mmap(-1, BLOCK) as buffer:  # aligned, as O_DIRECT requires
        buffer.write(os.urandom(MIB) * (BLOCK // MIB))
        for offset in range(0, count // BLOCK * BLOCK, BLOCK):
            act(fd, [buffer], offset)
