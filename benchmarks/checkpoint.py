"""Checkpoint save and load: time, extra memory, and how long training is blocked.

    python -m benchmarks.checkpoint [--sides zshard dcp ...] [--models large small] [--rounds 7]

All sides save the same state (parameters and Adam moments, about 1 GB in total) to the same disk,
with fsync, and load it from the page cache and, after dropping its pages, from the disk.
The sides take turns in one process group in rotating order, because a disk is faster after a pause.
Each load starts from overwritten values, and its result is verified. Peak memory is measured in
separate turns, because sampling takes time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks import harness
from benchmarks.harness import MIB, Spread
from benchmarks.memory import MALLOC, PssSampler, pss, trim

BLOCKS = 10
MODELS = {"large": (1, 2880), "small": (100, 288), "tiny": (2, 32)}
"""Linear layers per block, and their width. large: 30 state tensors of 33 MB; small: 3,000 of 332
kB; tiny: for --quick."""

TARGETS = {"large": {"save": 2.0, "load": 3.0}, "small": {"save": 3.0, "load": 3.0}}
"""Required speedup over dcp."""


class Block(nn.Sequential):
    """A stack of Linear layers without bias."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def build(model: str) -> nn.Module:
    torch.manual_seed(0)
    layers, width = MODELS[model]
    return nn.Sequential(*(Block(layers, width) for _ in range(BLOCKS)))


# --------------------------------------------------------------------------------------
# Sides


class Side:
    """A model and its optimizer after one step, saved and loaded with one library."""

    def __init__(self, model: str) -> None:
        self.model: Any = self.wrap(build(model))
        self.optimizer = self.make_optimizer()
        self.model(torch.randn(1, MODELS[model][1])).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def wrap(self, module: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for child in module:  # type: ignore[attr-defined]
            fully_shard(child, mesh=mesh)
        fully_shard(module, mesh=mesh)
        return module

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), fused=True)

    def save(self, path: str) -> Callable[[], Any]:
        """Save to `path` and return a function that waits for completion."""
        raise NotImplementedError

    def load(self, path: str) -> None:
        raise NotImplementedError

    def own(self) -> list[Tensor]:
        """Return this rank's elements of all tensors of the state, parameters first."""
        import zshard

        params = list(self.model.parameters())
        states = [self.optimizer.state[p] for p in params]
        tensors = [*params, *(s[key] for s in states for key in ("exp_avg", "exp_avg_sq"))]
        return [zshard.to_local(getattr(t, "_local_tensor", t)).detach() for t in tensors]


class Zshard(Side):
    def wrap(self, module: nn.Module) -> nn.Module:
        import zshard

        return zshard.FSDP(module, auto_wrap_policy={Block}, transport="shm")

    def make_optimizer(self) -> torch.optim.Optimizer:
        import zshard

        return zshard.AdamW(self.model.parameters())

    def save(self, path: str) -> Callable[[], Any]:
        import zshard

        return zshard.save(path, self.model, self.optimizer).wait

    def load(self, path: str) -> None:
        import zshard

        zshard.load(path, self.model, self.optimizer)


class ZshardAsync(Zshard):
    def save(self, path: str) -> Callable[[], Any]:
        import zshard

        return zshard.save(path, self.model, self.optimizer, asynchronous=True).wait


class Dcp(Side):
    """torch.distributed.checkpoint of fully_shard's DTensors, as in its tutorial."""

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path: str) -> Callable[[], Any]:
        dcp.save(self.state(), checkpoint_id=path)
        return lambda: None

    def load(self, path: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class DcpAsync(Dcp):
    def save(self, path: str) -> Callable[[], Any]:
        return dcp.async_save(self.state(), checkpoint_id=path).result  # type: ignore[union-attr]


class Rank0(Side):
    """Rank 0 gathers the full state and writes it with torch.save; every rank loads all of it."""

    def save(self, path: str) -> Callable[[], Any]:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_state_dict(self.model, self.optimizer, options=options)
        if dist.get_rank() == 0:
            os.mkdir(path)
            with open(self.file(path), "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()
        return lambda: None

    def load(self, path: str) -> None:
        model, optimizer = torch.load(self.file(path), mmap=True)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=model,
            optim_state_dict=optimizer,
            options=StateDictOptions(full_state_dict=True),
        )

    def file(self, path: str) -> str:
        return os.path.join(path, "state.pt")


SIDES: dict[str, type[Side]] = {
    "zshard": Zshard,
    "dcp": Dcp,
    "rank0": Rank0,
    "zshard-async": ZshardAsync,
    "dcp-async": DcpAsync,
}


# --------------------------------------------------------------------------------------
# A rank's part


def turn(side: Side, folder: str, name: str) -> dict[str, float]:
    """Time one save and two loads; return seconds on this rank."""
    path = os.path.join(folder, name)
    wanted = [tensor.clone() for tensor in side.own()]
    os.sync()  # do not charge this side for earlier writes
    dist.barrier()
    start = time.perf_counter()
    wait = side.save(path)
    blocked = time.perf_counter() - start
    wait()
    dist.barrier()
    saved = time.perf_counter() - start
    warm = timed_load(side, path, wanted)
    drop(path)
    cold = timed_load(side, path, wanted)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()
    return {"blocked": blocked, "save": saved, "load": warm, "cold": cold}


def timed_load(side: Side, path: str, wanted: Sequence[Tensor]) -> float:
    for tensor in side.own():
        tensor.fill_(7.0)
    dist.barrier()
    start = time.perf_counter()
    side.load(path)
    dist.barrier()
    seconds = time.perf_counter() - start
    if not all(torch.equal(a, b) for a, b in zip(side.own(), wanted, strict=True)):
        raise AssertionError(f"{type(side).__name__} loaded different values than it saved")
    return seconds


def drop(path: str) -> None:
    """Drop the page cache of all files below `path`."""
    for file in Path(path).rglob("*"):
        if file.is_file():
            with open(file, "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def peaks(side: Side, folder: str, name: str) -> dict[str, float]:
    """Return the peak growth of this rank's PSS in bytes, for a save and for a load."""
    path = os.path.join(folder, name)
    found = {}
    for what, action in (("save", lambda: side.save(path)()), ("load", lambda: side.load(path))):
        trim()
        dist.barrier()
        before, sampler = pss(), PssSampler()
        action()
        sampler.sample()
        found[what] = float(sampler.stop() - before)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()
    return found


def measure_as_rank(args: argparse.Namespace) -> None:
    with harness.process_group() as rank:
        control = dist.new_group(backend="gloo")
        sides = {name: SIDES[name](args.models[0]) for name in args.sides}
        runs: list[dict[str, Any]] = []
        for number in range(args.rounds + 1):  # the first one warms up
            order = harness.rotated(list(sides), number)
            mine = {name: turn(sides[name], args.path, f"{name}-{number}") for name in order}
            ranks = harness.of_all_ranks(mine, control)
            runs.append({n: {k: max(r[n][k] for r in ranks) for k in ranks[0][n]} for n in order})
            harness.progress(number, args.rounds)
        mine = {name: peaks(side, args.path, f"{name}-peak") for name, side in sides.items()}
        state = sum(t.numel() * t.element_size() for t in next(iter(sides.values())).own())
        ranks = harness.of_all_ranks(mine, control)
        most = {n: {k: max(r[n][k] for r in ranks) for k in ranks[0][n]} for n in sides}
    if rank == 0 and args.out:
        harness.write_json(args.out, {"runs": runs[1:], "peaks": most, "state_bytes": state})
    sys.stdout.flush()
    os._exit(0)  # torch's process groups sometimes abort at interpreter exit


# --------------------------------------------------------------------------------------
# The comparison


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    purpose = "Time checkpoint saves and loads, all sides in one process group."
    parser = harness.parser(purpose, ranks=2, rounds="rounds (default: 7; with --quick: 1)")
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=list(SIDES), help="default: all"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default: large small")
    parser.add_argument(
        "--path", help="directory on the disk to measure (default: a temporary one)"
    )
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (1 if args.quick else 7)
    args.models = args.models or (["tiny"] if args.quick else ["large", "small"])
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if harness.under_torchrun():
        measure_as_rank(args)
        return
    results = []
    for model in args.models:
        with tempfile.TemporaryDirectory(prefix="zshard-bench-", dir=args.path) as folder:
            flags = ["--sides", *args.sides, "--models", model, "--path", folder]
            flags += ["--rounds", str(args.rounds)]
            found = harness.collect("benchmarks.checkpoint", args.ranks, flags, MALLOC)
        results.append(compare(model, args.ranks, found))
        show(results[-1])
    harness.finish(args, "checkpoint", results)


def compare(model: str, ranks: int, found: dict[str, Any]) -> dict[str, Any]:
    """Return a model's record: spreads of seconds, and of dcp's seconds / the side's by round."""
    sides = {}
    for name in found["runs"][0]:
        own = [run[name] for run in found["runs"]]
        sides[name] = {key: Spread.of([r[key] for r in own]).as_dict() for key in own[0]}
        base = "dcp-async" if name.endswith("async") else "dcp"
        if base in found["runs"][0]:
            times = {
                key: Spread.of([run[base][key] / run[name][key] for run in found["runs"]]).as_dict()
                for key in own[0]
            }
            sides[name]["faster"] = times
        sides[name]["peaks"] = found["peaks"][name]
    share = found["state_bytes"]
    return {"model": model, "ranks": ranks, "state_bytes_per_rank": share, "sides": sides}


def show(result: dict[str, Any]) -> None:
    targets = TARGETS.get(result["model"], {})
    rows = []
    for name, side in result["sides"].items():
        row = [name]
        for key in ("blocked", "save", "load", "cold"):
            faster = side["faster"][key]["median"] if "faster" in side else 0.0
            met = ""
            if name == "zshard" and key in targets and faster:
                met = f", {targets[key]:g}: {'met' if faster >= targets[key] else 'MISSED'}"
            row.append(f"{Spread(**side[key]).text(3)} ({faster:.1f}x{met})")
        share = result["state_bytes_per_rank"]
        row += [
            f"{side['peaks'][key] / MIB:.0f} ({side['peaks'][key] / share:.0%})"
            for key in side["peaks"]
        ]
        rows.append(row)
    harness.print_table(
        f"{result['model']}, {result['ranks']} ranks, "
        f"{result['state_bytes_per_rank'] / MIB:.0f} MiB of state per rank; seconds (speedup "
        "over dcp), min/median/max",
        ["side", "blocked", "save", "load, warm", "load, cold", "save peak, MiB", "load peak, MiB"],
        rows,
    )


if __name__ == "__main__":
    harness.start(main)
