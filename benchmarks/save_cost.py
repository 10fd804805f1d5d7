"""What asynchronous saves cost the steps beside them: a save at every tenth step, and at every one.

    python -m benchmarks.save_cost [--sides zshard fsdp2] [--workloads gpt85m] [--rounds 5]

A turn is ten steps: without a save, with one, or with one at each step; it ends when the last save
has finished. The turns of one library follow each other in rotating order in one process group, so
what the machine does besides meets all of them. A save syncs, and keep_last deletes the one before.
FSDP2 saves with dcp.async_save(), with its staging as it is by default.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from benchmarks import harness
from benchmarks.harness import Spread
from benchmarks.models import WORKLOADS
from benchmarks.sides import build_side

STEPS = 10
EVERY = {"no save": 0, "every tenth step": STEPS, "every step": 1}
SIDES = {"zshard": "zshard-full_shard-auto", "fsdp2": "fsdp2"}


class Saver:
    """Saves a side's model and optimizer, and deletes the checkpoint before."""

    def __init__(self, side: Any, folder: str) -> None:
        self.side, self.folder, self.number = side, folder, 0
        self._running: Callable[[], object] = lambda: None

    def save(self) -> None:
        self.number += 1

    def wait(self) -> None:
        self._running()
        self._running = lambda: None


class ZshardSaver(Saver):
    def save(self) -> None:
        import zshard

        super().save()
        options: dict[str, Any] = {"step": self.number, "keep_last": 1, "asynchronous": True}
        model, optimizer = self.side.module, self.side.optimizer
        self._running = zshard.save(self.folder, model, optimizer, **options).wait


class DcpSaver(Saver):
    def save(self) -> None:
        self.wait()  # it refuses a second save beside the first
        if dist.get_rank() == 0 and self.number:
            shutil.rmtree(os.path.join(self.folder, str(self.number)))
        super().save()
        model, optimizer = get_state_dict(self.side.module, self.side.optimizer)
        path = os.path.join(self.folder, str(self.number))
        saved: Any = dcp.async_save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        self._running = saved.result


SAVERS: dict[str, type[Saver]] = {"zshard": ZshardSaver, "fsdp2": DcpSaver}


def measure(workload_name: str, side_name: str, rounds: int, folder: str) -> dict[str, Any]:
    """Return samples of each turn. Collective."""
    workload = WORKLOADS[workload_name]
    side = build_side(SIDES[side_name], workload)
    saver = SAVERS[side_name](side, folder)
    batch = workload.batch(harness.generator())

    def turn(every: int) -> Callable[[int], tuple[float, ...]]:
        def run(_: int) -> tuple[float, ...]:
            os.sync()
            dist.barrier()
            start = time.perf_counter()
            for step in range(STEPS):
                side.step(batch)
                if every and step % every == 0:
                    saver.save()
            saver.wait()
            return (time.perf_counter() - start,)

        return run

    turns = {name: turn(every) for name, every in EVERY.items()}
    samples = harness.interleave(turns, rounds, warmup=1)
    base = samples["no save"]
    return {
        name: {
            "seconds": Spread.of([s.times[0] / STEPS for s in own]).as_dict(),
            "ratio": Spread.of(
                [a.times[0] / b.times[0] for a, b in zip(own, base, strict=True)]
            ).as_dict(),
        }
        for name, own in samples.items()
    }


def measure_as_rank(args: argparse.Namespace) -> None:
    with harness.process_group() as rank:
        folder = os.path.join(args.path, args.sides[0])
        if rank == 0:
            os.mkdir(folder)
        dist.barrier()
        found = measure(args.workloads[0], args.sides[0], args.rounds, folder)
    if rank == 0:
        harness.write_json(args.out, found)
    sys.stdout.flush()
    os._exit(0)  # torch's process groups sometimes abort at interpreter exit


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    purpose = "Time steps with and without asynchronous saves beside them."
    parser = harness.parser(purpose, ranks=2, rounds="rounds (default: 5; with --quick: 1)")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS)
    parser.add_argument("--path", help="directory on the disk (default: a temporary one)")
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (1 if args.quick else 5)
    args.workloads = args.workloads or (["gpt10m"] if args.quick else ["gpt85m", "gpt10m"])
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if harness.under_torchrun():
        measure_as_rank(args)
        return
    results = []
    for workload in args.workloads:
        for side in args.sides:
            with tempfile.TemporaryDirectory(prefix="zshard-bench-", dir=args.path) as folder:
                flags = ["--sides", side, "--workloads", workload, "--path", folder]
                flags += ["--rounds", str(args.rounds)]
                found = harness.collect("benchmarks.save_cost", args.ranks, flags)
            results.append({"workload": workload, "side": side, "turns": found})
            rows = [
                [name, f"{1e3 * t['seconds']['median']:.0f}", f"{t['ratio']['median']:.3f}"]
                for name, t in found.items()
            ]
            harness.print_table(f"{workload}, {side}", ["", "ms per step", "of no save"], rows)
    harness.finish(args, "save-cost", results)


if __name__ == "__main__":
    harness.start(main)
