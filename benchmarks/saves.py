"""Checkpoints, set-up, loading and offload: seconds, memory, and how long training waits.

    python -m benchmarks.saves [--cases checkpoint offload ...] [--models M ...] [--sides S ...]

- checkpoint: all sides save the same state (1 GB) with fsync, load it from the page cache and, its
  pages dropped, from the disk. They take turns in one process group. Each load starts from
  overwritten values and is verified. Peaks are measured in separate turns: sampling takes time.
- beside: ten steps without a save, with one, or with one at each step, until the last has finished.
- set-up, loading: each side alone in a fresh process group: how much memory does a rank need beyond
  what it keeps? Loads read a safetensors file that stays in the page cache.
- offload: the model in memory, the same on disk under a memory limit, and a program that only moves
  the bytes of such a step with O_DIRECT. The third's time / the second's is `of_the_disk`.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

import zshard
from benchmarks import harness
from benchmarks.harness import MIB, spread
from benchmarks.memory import MALLOC, PssSampler, high_water, pss, reset_high_water, trim
from benchmarks.models import WORKLOADS, GPTBlock, Workload, rows
from benchmarks.sides import SEED, build_side, by_fsdp1, by_fsdp2, by_zshard

Numbers = dict[str, Any]
"""What one side took in one round, the maximum over ranks: seconds, or bytes (`..._bytes`)."""

# --- checkpoint: a rank's part --------------------------------------------------------------------


class Saver:
    """Saves and loads a model and its optimizer with one library."""

    def __init__(self, model: Any, optimizer: Any, asynchronous: bool = False) -> None:
        self.model, self.optimizer, self.asynchronous = model, optimizer, asynchronous

    def save(self, path: str) -> Callable[[], Any]:
        """Save to `path` and return a function that waits for completion."""
        raise NotImplementedError

    def load(self, path: str) -> None:
        raise NotImplementedError

    def own(self) -> list[Tensor]:
        """Return this rank's elements of all tensors of the state, parameters first."""
        params = list(self.model.parameters())
        states = [self.optimizer.state[p] for p in params]
        tensors = [*params, *(s[key] for s in states for key in ("exp_avg", "exp_avg_sq"))]
        return [zshard.to_local(getattr(t, "_local_tensor", t)).detach() for t in tensors]


class Zshard(Saver):
    def save(self, path: str, **options: Any) -> Callable[[], Any]:
        options["asynchronous"] = self.asynchronous
        return zshard.save(path, self.model, self.optimizer, **options).wait

    def load(self, path: str) -> None:
        zshard.load(path, self.model, self.optimizer)


class Dcp(Saver):
    """torch.distributed.checkpoint of fully_shard's DTensors, as in its tutorial."""

    options = StateDictOptions()
    group: dist.ProcessGroup | None = None

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model_state_dict": model, "optim_state_dict": optimizer}

    def save(self, path: str) -> Callable[[], Any]:
        if not self.asynchronous:
            dcp.save(self.state(), checkpoint_id=path)
            return lambda: None
        if self.group is None:  # its thread must not meet training in one process group
            self.group = dist.new_group(backend="gloo")
        options: dict[str, Any] = {"checkpoint_id": path, "process_group": self.group}
        return dcp.async_save(self.state(), **options).result

    def load(self, path: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, **state, options=self.options)


class Rank0(Dcp):
    """Rank 0 gathers the full state and writes it with torch.save; every rank loads all of it."""

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def save(self, path: str) -> Callable[[], Any]:
        state = self.state()
        if dist.get_rank() == 0:
            os.mkdir(path)
            with open(f"{path}/state.pt", "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()
        return lambda: None

    def load(self, path: str) -> None:
        state = torch.load(f"{path}/state.pt", mmap=True)
        set_state_dict(self.model, self.optimizer, **state, options=self.options)


SAVERS: dict[str, tuple[type[Saver], str, bool]] = {
    "zshard": (Zshard, "zshard-full_shard", False),
    "dcp": (Dcp, "fsdp2", False),
    "rank0": (Rank0, "fsdp2", False),
    "zshard-async": (Zshard, "zshard-full_shard", True),
    "dcp-async": (Dcp, "fsdp2", True),
}
BESIDE = {"zshard": (Zshard, "zshard-full_shard-auto", True), "fsdp2": (Dcp, "fsdp2", True)}
"""Side -> its saver, what it trains with (sides.py), whether saves are asynchronous."""


def saver_of(
    workload: Workload, kind: type[Saver], library: str, asynchronous: bool
) -> tuple[Saver, Callable[[], Any]]:
    """Return a saver after one step of training, and the step."""
    trained, batch = build_side(library, workload), workload.batch(harness.generator())
    trained.step(batch)
    saver = kind(trained.module, trained.optimizer, asynchronous)
    return saver, lambda: trained.step(batch)


class Block(nn.Sequential):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def _state(layers: int, width: int) -> Workload:
    def build() -> nn.Module:
        return nn.Sequential(*(Block(layers, width) for _ in range(10)))

    return rows("state", build, Block, rows=1, width=width)


STATES = {"large": _state(1, 2880), "small": _state(100, 288), "tiny": _state(2, 32)}
"""large: 30 state tensors of 33 MB; small: 3,000 of 332 kB."""


def checkpoint(model: str, sides: list[str], rounds: int, folder: str) -> list[dict[str, Numbers]]:
    """Return the numbers of each round, then the peaks."""
    savers = {name: saver_of(STATES[model], *SAVERS[name])[0] for name in sides}
    found = []
    for number in range(rounds + 1):
        order = harness.rotated(sides, number)
        mine = {name: save_and_load(savers[name], f"{folder}/{name}-{number}") for name in order}
        found.append(slowest(mine))
    peaks = {name: peaks_of(saver, f"{folder}/{name}-peak") for name, saver in savers.items()}
    return [*found[1:], slowest(peaks)]  # the first one warms up


def slowest(mine: Any) -> Any:
    """Return the ranks' maximum of each number in nested dicts. Collective."""

    def merge(ranks: Sequence[Any]) -> Any:
        if not isinstance(ranks[0], dict):
            return max(ranks)
        return {key: merge([rank[key] for rank in ranks]) for key in ranks[0]}

    return merge(harness.of_all_ranks(mine))


def save_and_load(saver: Saver, path: str) -> Numbers:
    wanted = [tensor.clone() for tensor in saver.own()]
    os.sync()  # do not charge this side for earlier writes
    dist.barrier()
    start = time.perf_counter()
    wait = saver.save(path)
    blocked = time.perf_counter() - start
    wait()
    dist.barrier()
    found = {"blocked": blocked, "save": time.perf_counter() - start}
    for key in ("load", "cold"):
        if key == "cold":
            drop(path)
        for tensor in saver.own():
            tensor.fill_(7.0)
        dist.barrier()
        start = time.perf_counter()
        saver.load(path)
        dist.barrier()
        found[key] = time.perf_counter() - start
        if not all(torch.equal(a, b) for a, b in zip(saver.own(), wanted, strict=True)):
            raise AssertionError(f"{type(saver).__name__} loaded different values than it saved")
    remove(path)
    return found


def peaks_of(saver: Saver, path: str) -> Numbers:
    """Return the growth of this rank's PSS at the peak of a save and of a load, and the state."""
    found = {"state_bytes": sum(t.numel() * t.element_size() for t in saver.own())}
    for what, act in (("save", lambda: saver.save(path)()), ("load", lambda: saver.load(path))):
        trim()
        dist.barrier()
        before, sampler = pss(), PssSampler()
        act()
        sampler.sample()
        found[f"{what}_peak_bytes"] = sampler.stop() - before
    remove(path)
    return found


def drop(path: str) -> None:
    """Drop the page cache of all files below `path`."""
    for file in Path(path).rglob("*"):
        if file.is_file():
            with open(file, "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def remove(path: str) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()


# --- beside: a rank's part ------------------------------------------------------------------------

STEPS = 10
EVERY = {"no save": 0, "every tenth step": STEPS, "every step": 1}


def beside(model: str, sides: list[str], rounds: int, folder: str) -> list[dict[str, Numbers]]:
    """Return seconds per step of each side without and with saves, in each round."""
    turns = {}
    for side in sides:
        saver, train = saver_of(WORKLOADS[model], *BESIDE[side])
        save = Successive(saver, f"{folder}/{side}")
        for name, every in EVERY.items():
            turns[side, name] = partial(steps_and_saves, train, save, every)
    samples = harness.interleave(turns, rounds, warmup=1)
    found = []
    for number in range(rounds):
        seconds = {
            side: {name: samples[side, name][number].times[0] for name in EVERY} for side in sides
        }
        for own in seconds.values():
            own |= {f"{name}, ratio": own[name] / own["no save"] for name in EVERY}
        found.append(seconds)
    return found


def steps_and_saves(
    train: Callable[[], Any], save: Successive, every: int, _number: int
) -> tuple[float]:
    os.sync()
    dist.barrier()
    start = time.perf_counter()
    for step in range(STEPS):
        train()
        if every and step % every == 0:
            save()
    save.wait()
    return ((time.perf_counter() - start) / STEPS,)


class Successive:
    """Saves again and again, and deletes the save before, which has to end first."""

    def __init__(self, saver: Saver, path: str) -> None:
        self.saver, self.path, self.count = saver, path, 0
        self.wait: Callable[[], Any] = lambda: None

    def __call__(self) -> None:
        self.wait()
        if dist.get_rank() == 0 and self.count:
            shutil.rmtree(f"{self.path}-{self.count}")
        self.count += 1
        self.wait = self.saver.save(f"{self.path}-{self.count}")


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


SETUPS: dict[str, Callable[[str], nn.Module]] = {
    "plain": build,
    "zshard-meta": lambda size: by_zshard(on_meta(size), UNITS),
    "zshard-real": lambda size: by_zshard(build(size), UNITS),
    "fsdp1-meta": lambda size: by_fsdp1(on_meta(size), UNITS),
    "fsdp2-meta": fsdp2_from_meta,
    "fsdp2-real": lambda size: by_fsdp2(build(size), UNITS),
}
"""Functions that build a sharded model with random values. plain is unsharded: the lower bound."""

LOADS: dict[str, tuple[Callable[[str], Any], Callable[[Any, str], Any]]] = {
    "zshard-load": (zshard_blank, lambda model, path: zshard.load(path, model)),
    "zshard-load-from-rank0": (zshard_blank, zshard_from_rank0),
    "zshard-load-each": (zshard_blank, lambda model, path: model.load_state_dict(load_file(path))),
    "fsdp2-load-from-rank0": (fsdp2_blank, lambda model, path: fsdp2_load(model, path, True)),
    "fsdp2-load-each": (fsdp2_blank, lambda model, path: fsdp2_load(model, path, False)),
}
"""Functions that build a model without values, and load it from a file. each: every rank reads the
full file into memory and keeps its shard; from-rank0: rank 0 reads it and sends the shards."""


def alone(model: str, side: str, number: int, folder: str) -> Numbers:
    """Return seconds and bytes beyond those held before; in the first round the peak without mapped
    files, which takes samples, instead."""
    make = SETUPS.get(side) or LOADS[side][0]
    with torch.random.fork_rng():
        make("tiny")  # once per process: groups, arenas
    torch.manual_seed(SEED)
    blank: Any = None if side in SETUPS else make(model)
    for param in blank.parameters() if side in LOADS else ():
        getattr(param, "_local_tensor", param).detach().fill_(0.5)  # touches all pages
    trim()
    dist.barrier()
    reset_high_water()
    before, sampler = (high_water(), None) if number else (pss(), PssSampler())
    start, busy = time.perf_counter(), time.process_time()
    made = make(model) if side in SETUPS else LOADS[side][1](blank, f"{folder}/model.safetensors")
    dist.barrier()
    found = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - busy}
    if sampler:
        sampler.sample()
        return slowest({"peak_bytes": sampler.stop() - before})
    found["peak_rss_bytes"] = high_water() - before
    trim()
    reset_high_water()
    found["kept_rss_bytes"] = high_water() - before
    del made
    return slowest(found)


# --- offload: a rank's part -----------------------------------------------------------------------

LEARNED, OFFLOAD_STEPS = 2, 6
"""The first step creates the optimizer state, the second records the access order: both untimed."""

BLOCK = 16 * MIB


def offload(model: str, side: str, number: int, folder: str, limits: Mapping[str, Any]) -> Numbers:
    """Train with the optimizer in backward; return seconds and bytes per step, and the last loss.
    The side "raw" moves the bytes of the disk's step instead."""
    if side == "raw":
        return move(folder, json.loads(Path(folder, "moved").read_text()))
    if side == "disk" and limits["cgroup"]:
        Path(limits["cgroup"], "cgroup.procs").write_text(str(os.getpid()))
    elif side == "disk":
        resource.setrlimit(resource.RLIMIT_DATA, (limits["bytes"], limits["bytes"]))
    workload = WORKLOADS[model]
    with torch.device("meta"):
        plain = workload.build()
    torch.manual_seed(SEED)
    where = zshard.Offload(directory=folder, cache=limits["cache"]) if side == "disk" else None
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
    return slowest(found)


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
    return slowest({"seconds": time.perf_counter() - start})


def transfer(fd: int, count: int, act: Callable[..., int]) -> None:
    with mmap.mmap(-1, BLOCK) as buffer:  # aligned, as O_DIRECT requires
        buffer.write(os.urandom(MIB) * (BLOCK // MIB))
        for offset in range(0, count // BLOCK * BLOCK, BLOCK):
            act(fd, [buffer], offset)


# --- the comparison -------------------------------------------------------------------------------

PARTS = {each.__name__: each for each in (checkpoint, beside, alone, offload)}


class Case(NamedTuple):
    part: str
    together: bool
    """Whether all sides and rounds are in one process group, or each is in its own."""
    sides: Iterable[str]
    models: list[str]
    quick_models: list[str]
    rounds: int


CASES = {
    "checkpoint": Case("checkpoint", True, SAVERS, ["large", "small"], ["tiny"], 7),
    "beside": Case("beside", True, BESIDE, ["gpt85m", "gpt10m"], ["tiny32"], 5),
    "set-up": Case("alone", False, SETUPS, ["gpt355m"], ["tiny"], 6),
    "loading": Case("alone", False, LOADS, ["gpt355m"], ["tiny"], 6),
    "offload": Case("offload", False, ("disk", "raw", "memory"), ["stack128"], ["gpt10m"], 3),
}
BASES = {"zshard": "dcp", "rank0": "dcp", "zshard-async": "dcp-async"}
BASES |= {"disk": "memory", "raw": "disk"}
"""Side -> what it is compared with in the same round."""

GOALS = {
    **{("large", "zshard", "save_ratio"): 1 / 2, ("large", "zshard", "load_ratio"): 1 / 3},
    **{("small", "zshard", "save_ratio"): 1 / 3, ("small", "zshard", "load_ratio"): 1 / 3},
}
"""Model, side, number -> its largest median."""

QUICK_SIDES = ["zshard-meta", "fsdp2-meta", "zshard-load", "fsdp2-load-each"]
FULL = {
    "cases": list(CASES),
    "models": [],
    "sides": [],
    "rounds": 0,
    "ranks": 2,
    "path": None,
    "cgroup": None,
    "limit_mib": 1500,
    "cache_mib": 160,
}


def main(argv: Sequence[str] | None = None) -> None:
    if harness.under_torchrun():
        harness.run_task(lambda part, **task: PARTS[part](**task))
    args = harness.options(__doc__.splitlines()[0], argv, FULL, {}, {"cases": CASES})
    results = []
    for name in args.cases:
        case = CASES[name]
        wanted = args.sides or (QUICK_SIDES if args.quick and case.part == "alone" else case.sides)
        sides = [side for side in case.sides if side in wanted]
        for model in args.models or (case.quick_models if args.quick else case.models):
            found = measure(case, model, sides, args)
            records = {side: summary(side, found) for side in sides}
            results.append({"case": name, "model": model, "ranks": args.ranks, "sides": records})
            show(results[-1])
    harness.finish(args, "saves", results)


def measure(
    case: Case, model: str, sides: list[str], args: argparse.Namespace
) -> list[dict[str, Numbers]]:
    """Return the sides' numbers in each round."""
    rounds = args.rounds or (1 + (case.part == "alone") if args.quick else case.rounds)
    with tempfile.TemporaryDirectory(prefix="zshard-bench-", dir=args.path) as folder:
        task = {"part": case.part, "model": model, "folder": folder}
        if case.part == "alone":
            torch.manual_seed(SEED)
            save_file(build(model).state_dict(), f"{folder}/model.safetensors")
        if case.part == "offload":
            limit, cache = args.limit_mib * MIB // args.ranks, args.cache_mib * MIB
            task["limits"] = {"cgroup": args.cgroup, "bytes": limit, "cache": cache}

        def collect(**rest: Any) -> Any:
            return harness.collect("benchmarks.saves", args.ranks, {**task, **rest}, MALLOC)

        if case.together:
            return collect(sides=sides, rounds=rounds)
        return [{side: collect(side=side, number=n) for side in sides} for n in range(rounds)]


def summary(side: str, rounds: Sequence[dict[str, Numbers]]) -> dict[str, Any]:
    """Return the largest of bytes, min, median and max of the rest, and of ratios to the base."""
    found: dict[str, list[Any]] = {}
    for numbers in rounds:
        base = numbers.get(BASES.get(side, ""), {})
        for key, value in numbers.get(side, {}).items():
            found.setdefault(key, []).append(value)
            if not key.endswith("_bytes") and key in base:
                found.setdefault(f"{key}_ratio", []).append(value / base[key])
    return {k: max(own) if k.endswith("_bytes") else spread(own) for k, own in found.items()}


def show(result: Mapping[str, Any]) -> None:
    """Print a table, and whether the goals are met."""
    keys = list(dict.fromkeys(key for side in result["sides"].values() for key in side))

    def text(value: Any) -> str:
        if isinstance(value, dict):
            return "/".join(f"{each:.3g}" for each in value.values())
        return "" if value is None else f"{value / MIB:.0f}"

    rows = [[name, *(text(side.get(k)) for k in keys)] for name, side in result["sides"].items()]
    title = f"{result['case']}, {result['model']}, {result['ranks']} ranks: MiB, or min/median/max"
    harness.print_table(title, ["side", *keys], rows)
    for (model, side, key), most in GOALS.items():
        value = result["sides"].get(side, {}).get(key) if model == result["model"] else None
        if value:
            print(f"{side}, {key}: {harness.verdict(value['median'], most)}")


if __name__ == "__main__":
    harness.start(main)
