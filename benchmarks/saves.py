"""Checkpoints, wrapping, set-up, loading and offload: seconds, memory, and how long training waits.

    python -m benchmarks.saves [--cases checkpoint offload ...] [--models M ...] [--sides S ...]

- checkpoint: sides save the same state (1 GB) with fsync, load it from the page cache, and from the
  disk once its pages are dropped. They take turns in one process group; each load is verified.
- beside: ten steps without a save, with one, or with one at each step, until the last has finished.
- wrap: the seconds of FSDP(model), fully_shard and DDP, for a GPT and for chains of small units.
- set-up, loading: each side in a fresh process group: how much memory does a rank need beyond the
memory that it keeps? Loads read a safetensors file that stays in the page cache.
- offload: the model in memory, the same on disk under a memory limit, and a program that only moves
  the bytes of such a step with O_DIRECT (raw): its ratio is zshard's fraction of the disk's speed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import zshard
from benchmarks import harness
from benchmarks.harness import Numbers, spread
from benchmarks.loads import LOADS, SETUPS, WRAPS, alone, build, offload, wrapped
from benchmarks.memory import MALLOC, PssSampler, pss, trim
from benchmarks.models import WORKLOADS, Workload, rows
from benchmarks.sides import SEED, build_side

# --- checkpoint: a rank's part --------------------------------------------------------------------


def ended() -> None:
    """Waits for nothing: the save is complete when it returns."""


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
    def save(self, path: str) -> Callable[[], Any]:
        return zshard.save(path, self.model, self.optimizer, asynchronous=self.asynchronous).wait

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
            return ended
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
        return ended

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
        found.append(harness.slowest(mine))
    peaks = {name: peaks_of(saver, f"{folder}/{name}-peak") for name, saver in savers.items()}
    return [*found[1:], harness.slowest(peaks)]  # the first one warms up


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
    """Delete a checkpoint, if there is one. Collective."""
    if path:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)
        dist.barrier()


# --- beside: a rank's part ------------------------------------------------------------------------

STEPS = 10
EVERY = {"no save": 0, "every tenth step": STEPS, "every step": 1}
BESIDE: dict[str, tuple[type[Saver], str]] = {
    "zshard": (Zshard, "zshard-full_shard-auto"),
    "fsdp2": (Dcp, "fsdp2"),
}


def beside(model: str, sides: list[str], rounds: int, folder: str) -> list[dict[str, Numbers]]:
    turns: dict[str, harness.Turn] = {}
    for library in dict.fromkeys(side.partition(", ")[0] for side in sides):
        trained = saver_of({**WORKLOADS, **STATES}[model], *BESIDE[library], asynchronous=True)
        for name, every in EVERY.items():
            path = f"{folder}/{library}"
            turns[f"{library}, {name}"] = partial(steps_and_saves, *trained, every, path)
    samples = harness.interleave(turns, rounds, warmup=1)
    return [
        {side: {"seconds": samples[side][number].times[0]} for side in turns}
        for number in range(rounds)
    ]


def steps_and_saves(
    saver: Saver, train: Callable[[], Any], every: int, path: str, _number: int
) -> tuple[float]:
    """Return the seconds of a step. A save deletes the one before, which has to end first."""
    os.sync()
    dist.barrier()
    start, last, wait = time.perf_counter(), "", ended
    for step in range(STEPS):
        train()
        if every and step % every == 0:
            wait()
            remove(last)
            last = f"{path}-{step}"
            wait = saver.save(last)
    wait()
    seconds = (time.perf_counter() - start) / STEPS
    remove(last)
    return (seconds,)


# --- the comparison -------------------------------------------------------------------------------

PARTS = {each.__name__: each for each in (checkpoint, beside, wrapped, alone, offload)}


class Case(NamedTuple):
    part: str
    together: bool
    """True: all sides and rounds in one process group; False: each in its own."""
    sides: Iterable[str]
    models: list[str]
    quick_models: list[str]
    rounds: int


TURNS = [f"{library}, {name}" for library in BESIDE for name in EVERY]
CASES = {
    "checkpoint": Case("checkpoint", True, SAVERS, ["large", "small"], ["tiny"], 7),
    "beside": Case("beside", True, TURNS, ["gpt85m", "gpt10m"], ["tiny"], 5),
    "wrap": Case("wrapped", False, WRAPS, ["gpt85m", "100", "1000", "5000"], ["10"], 3),
    "set-up": Case("alone", False, SETUPS, ["gpt355m"], ["tiny"], 6),
    "loading": Case("alone", False, LOADS, ["gpt355m"], ["tiny"], 6),
    "offload": Case("offload", False, ("disk", "raw", "memory"), ["stack128"], ["gpt10m"], 3),
}
BASES = {turn: f"{turn.partition(', ')[0]}, no save" for turn in TURNS}
BASES |= {"zshard": "dcp", "rank0": "dcp", "zshard-async": "dcp-async"}
BASES |= {"disk": "memory", "raw": "disk", "FSDP": "fully_shard", "DDP": "fully_shard"}
"""Side -> what it is compared with in the same round."""

GOALS = {
    ("large", "zshard"): {"save_ratio": 0.5, "load_ratio": 0.333},
    ("small", "zshard"): {"save_ratio": 0.333, "load_ratio": 0.333},
}
"""Model and side -> the largest medians."""

QUICK_SIDES = ["zshard-meta", "zshard-load", "fsdp2-load-each"]
FULL = {"cases": list(CASES), "models": [], "sides": [], "rounds": 0, "ranks": 2}
FULL |= {"path": None, "cgroup": None}


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
            records = {side: summary(model, side, found) for side in sides}
            results.append({"case": name, "model": model, "ranks": args.ranks, "sides": records})
            harness.show(f"{name}, {model}, {args.ranks} ranks", records)
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
            task["cgroup"] = args.cgroup

        def collect(**rest: Any) -> Any:
            env = MALLOC if case.part in ("checkpoint", "alone") else None  # those with peaks
            return harness.collect("benchmarks.saves", args.ranks, {**task, **rest}, env)

        if case.together:
            return collect(sides=sides, rounds=rounds)
        return [{side: collect(side=side, number=n) for side in sides} for n in range(rounds)]


def summary(model: str, side: str, rounds: Sequence[dict[str, Numbers]]) -> dict[str, Any]:
    """Return the largest of bytes, min, median and max of the rest, and of ratios to the base."""
    found: dict[str, list[Any]] = {}
    for numbers in rounds:
        base = numbers.get(BASES.get(side, ""), {})
        for key, value in numbers.get(side, {}).items():
            found.setdefault(key, []).append(value)
            if not key.endswith("_bytes") and key in base:
                found.setdefault(f"{key}_ratio", []).append(value / base[key])
    record = {k: max(own) if k.endswith("_bytes") else spread(own) for k, own in found.items()}
    for key, most in GOALS.get((model, side), {}).items():
        if key in record:
            record[f"{key} goal"] = harness.verdict(record[key]["median"], most)
    return record


if __name__ == "__main__":
    harness.start(main)
