"""Offload: a training step with the model on disk, compared with memory and with the disk itself.

    python -m benchmarks.offload [--models gpt85m stack128] [--limit-mib 1500] [--directory DIR]

Three programs take turns: the model in memory without a limit; the same model with parameters and
optimizer state in files, under a memory limit of a fraction of their size; and a program that only
moves, with O_DIRECT and as many processes, the bytes that a step of the second program read and
wrote. The third program's time / the second's is the fraction of the disk's speed that zshard
reaches. The losses of the first two programs must be equal.

The limit is a memory cgroup (v1 or v2), which counts page cache too, if this user may create one.
Otherwise it is RLIMIT_DATA, which does not count mapped files: check the peak RSS then.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import harness
from benchmarks.harness import MIB
from benchmarks.models import WORKLOADS

STEPS = 6
LEARNED = 2
"""Untimed steps: the first creates the optimizer state, the second records the access order."""

LIMIT = 1500
"""MiB. Two processes that have imported torch take half of it. Close to the limit the kernel evicts
pages that are needed next, which distorts the times."""

BLOCK = 16 * MIB
GOAL = 0.7


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    purpose = "Time a training step with parameters and optimizer state on disk."
    parser = harness.parser(purpose, ranks=2, rounds="rounds (default: 3; with --quick: 1)")
    parser.add_argument(
        "--models", nargs="+", choices=WORKLOADS, default=["stack128"], help="default: stack128"
    )
    limit = f"memory limit of all ranks together in MiB (default: {LIMIT})"
    parser.add_argument("--limit-mib", type=int, default=LIMIT, help=limit)
    cache = "Offload(cache=...) per rank in MiB (default: 160)"
    parser.add_argument("--cache-mib", type=int, default=160, help=cache)
    directory = "directory on the disk to measure (default: the system's temporary directory)"
    parser.add_argument("--directory", type=Path, help=directory)
    parser.add_argument("--side", choices=("memory", "disk", "raw"), help=argparse.SUPPRESS)
    parser.add_argument("--data-limit", type=int, help=argparse.SUPPRESS)  # bytes of a rank
    parser.add_argument("--move", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.rounds = args.rounds or 3
    if args.quick:
        args.models, args.rounds = ["gpt10m"], 1
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if harness.under_torchrun():
        measure_as_rank(args)
        return
    folder = Path(tempfile.mkdtemp(prefix="zshard-offload-", dir=args.directory))
    try:
        results = [run_model(model, args, folder) for model in args.models]
    finally:
        shutil.rmtree(folder)
    args.directory = str(args.directory or "")
    harness.finish(args, "offload", results)


def run_model(model: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the three programs in rounds; print and return the comparison."""
    rounds = []
    for _ in range(args.rounds):
        common = ["--models", model, "--directory", str(folder), "--cache-mib", str(args.cache_mib)]
        on_disk, limited = run_limited(args, [*common, "--side", "disk"])
        moved = [on_disk["read_bytes"], on_disk["write_bytes"]]
        raw = run_side(args, [*common, "--side", "raw", "--move", *map(str, moved)])
        memory = run_side(args, [*common, "--side", "memory"])
        rounds.append({"disk": on_disk, "limited": limited, "raw": raw, "memory": memory})
    result = summary(model, args, rounds)
    show(result)
    return result


def run_side(args: argparse.Namespace, flags: Sequence[str]) -> dict[str, Any]:
    measured: dict[str, Any] = harness.collect("benchmarks.offload", args.ranks, flags)
    return measured


def run_limited(
    args: argparse.Namespace, flags: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Like run_side() under the limit; also return the kind of limit and the peak it counted."""
    limit = args.limit_mib * MIB
    with cgroup(limit) as group:
        if group is not None:
            measured = run_side(args, flags)
            return measured, {"by": "cgroup", "bytes": limit, "peak_bytes": group.peak()}
    share = limit // args.ranks
    measured = run_side(args, [*flags, "--data-limit", str(share)])
    return measured, {"by": "RLIMIT_DATA", "bytes": limit, "peak_bytes": None}


# --------------------------------------------------------------------------------------
# Limits


class Cgroup:
    """A memory cgroup, v1 or v2."""

    def __init__(self, folder: Path, version: int) -> None:
        self.folder = folder
        self.version = version
        self._limit = "memory.limit_in_bytes" if version == 1 else "memory.max"
        self._peak = "memory.max_usage_in_bytes" if version == 1 else "memory.peak"
        self._tasks = "tasks" if version == 1 else "cgroup.procs"

    def set_limit(self, limit: int) -> None:
        (self.folder / self._limit).write_text(str(limit))

    def enter(self) -> None:
        """Move this process and its future children into the cgroup."""
        (self.folder / self._tasks).write_text(str(os.getpid()))

    def peak(self) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / self._peak).read_text())
        return None


def own_cgroup() -> Cgroup | None:
    """Return this process's memory cgroup, or None if none is visible."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Cgroup(Path("/sys/fs/cgroup/memory" + path), 1)
        if controllers == "" and Path("/sys/fs/cgroup/cgroup.controllers").exists():
            return Cgroup(Path("/sys/fs/cgroup" + path), 2)
    return None


@contextlib.contextmanager
def cgroup(limit: int) -> Iterator[Cgroup | None]:
    """A context in which this process is in a new cgroup with `limit`; None if not permitted."""
    home, group = own_cgroup(), None
    if home is not None:
        top = Path("/sys/fs/cgroup/memory") if home.version == 1 else home.folder
        group = Cgroup(top / f"zshard-bench-{os.getpid()}", home.version)
        try:
            group.folder.mkdir()
            group.set_limit(limit)
            group.enter()
        except OSError:
            with contextlib.suppress(OSError):
                group.folder.rmdir()
            group = None
    try:
        yield group
    finally:
        if group is not None and home is not None:
            home.enter()
            with contextlib.suppress(OSError):
                group.folder.rmdir()


# --------------------------------------------------------------------------------------
# A rank's part


def measure_as_rank(args: argparse.Namespace) -> None:
    with harness.process_group() as rank:
        if args.side == "raw":
            mine = move(Path(args.directory), *(number // args.ranks for number in args.move))
        else:
            mine = train(args)
        ranks = harness.of_all_ranks(mine)
    if rank == 0:
        harness.write_json(args.out, merge(ranks))
    sys.stdout.flush()
    os._exit(0)  # torch's process groups sometimes abort at interpreter exit


def merge(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the ranks' records: maximum of times, sum of bytes."""
    merged: dict[str, Any] = {}
    for key, first in ranks[0].items():
        values = [rank[key] for rank in ranks]
        if key == "losses":
            merged[key] = values
        elif key.endswith("_bytes"):
            merged[key] = sum(values)
        else:
            merged[key] = max(values) if first is not None else None
    return merged


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train with the optimizer in backward; return seconds and bytes per step, and the losses."""
    import zshard

    if args.data_limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (args.data_limit, args.data_limit))
    workload = WORKLOADS[args.models[0]]
    with torch.device("meta"):
        plain = workload.build()
    torch.manual_seed(1)
    offload = zshard.Offload(directory=args.directory, cache=args.cache_mib * MIB)
    model: Any = zshard.FSDP(
        plain,
        auto_wrap_policy=set(workload.units),
        param_init_fn=init,
        transport="shm",
        offload=offload if args.side == "disk" else None,
    )
    optimizer = zshard.AdamW(model.parameters(), lr=workload.lr)
    model.optimizer_in_backward(optimizer)
    generator = harness.generator()
    times, losses, before = [], [], (0, 0)
    for step in range(STEPS):
        if step == LEARNED:
            before = moved_bytes()
        batch = workload.batch(generator)
        dist.barrier()
        start = time.perf_counter()
        loss = workload.loss(model, batch)
        loss.backward()
        times.append(time.perf_counter() - start)
        losses.append(loss.item())
    after = moved_bytes()
    return {
        "seconds": statistics.median(times[LEARNED:]),
        "read_bytes": (after[0] - before[0]) // (STEPS - LEARNED),
        "write_bytes": (after[1] - before[1]) // (STEPS - LEARNED),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "losses": losses,
    }


def init(module: nn.Module) -> None:
    """Initialize `module` much like a workload that is not built on the meta device."""
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()
    else:
        for param in module.parameters(recurse=False):
            nn.init.normal_(param, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")


def moved_bytes() -> tuple[int, int]:
    """Return the bytes that this process has read from and written to storage."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def move(folder: Path, read: int, write: int) -> dict[str, Any]:
    """Read and write that many bytes of this rank's file at the same time."""
    size = max(read, write, BLOCK) // BLOCK * BLOCK
    path = folder / f"raw-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        transfer(fd, size, True)  # so that reads hit the disk
        dist.barrier()
        start = time.perf_counter()
        threads = [
            threading.Thread(target=transfer, args=(fd, read, False)),
            threading.Thread(target=transfer, args=(fd, write, True)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"seconds": time.perf_counter() - start}
    finally:
        os.close(fd)
        path.unlink()


def transfer(fd: int, count: int, write: bool) -> None:
    with mmap.mmap(-1, BLOCK) as buffer:  # aligned, as O_DIRECT requires
        buffer.write(os.urandom(MIB) * (BLOCK // MIB))
        for offset in range(0, count // BLOCK * BLOCK, BLOCK):
            if write:
                os.pwritev(fd, [buffer], offset)
            else:
                os.preadv(fd, [buffer], offset)


# --------------------------------------------------------------------------------------
# The comparison


def summary(
    model: str, args: argparse.Namespace, rounds: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the JSON record: medians over rounds, and ratios."""

    def spread(values: Sequence[float]) -> dict[str, float]:
        return harness.Spread.of(values).as_dict()

    state = 3 * 4 * WORKLOADS[model].parameters()
    return {
        "model": model,
        "ranks": args.ranks,
        "parameters_and_state_bytes": state,
        "limit": rounds[0]["limited"],
        "peak_bytes": [each["limited"]["peak_bytes"] for each in rounds],
        "read_bytes": statistics.median(each["disk"]["read_bytes"] for each in rounds),
        "write_bytes": statistics.median(each["disk"]["write_bytes"] for each in rounds),
        "seconds": {
            side: spread([each[side]["seconds"] for each in rounds])
            for side in ("memory", "disk", "raw")
        },
        "of_the_disk": spread(
            [each["raw"]["seconds"] / each["disk"]["seconds"] for each in rounds]
        ),
        "of_memory": spread(
            [each["disk"]["seconds"] / each["memory"]["seconds"] for each in rounds]
        ),
        "same_losses": all(each["disk"]["losses"] == each["memory"]["losses"] for each in rounds),
        "goal": GOAL,
    }


def show(result: Mapping[str, Any]) -> None:
    seconds, share = result["seconds"], result["of_the_disk"]
    limit, peak = result["limit"], result["peak_bytes"][0]
    rows = [
        [side, f"{spread['median']:.2f}", f"{spread['min']:.2f}-{spread['max']:.2f}"]
        for side, spread in seconds.items()
    ]
    state = result["parameters_and_state_bytes"]
    title = (
        f"{result['model']}: {state / MIB:.0f} MiB of parameters and state, limit "
        f"{limit['bytes'] / MIB:.0f} MiB ({limit['by']}"
    )
    title += f", peak {peak / MIB:.0f} MiB)" if peak else ")"
    harness.print_table(title, ["side", "s per step", "range"], rows)
    read, write = result["read_bytes"], result["write_bytes"]
    print(f"a step reads {read / MIB:.0f} MiB and writes {write / MIB:.0f} MiB")
    met = "met" if share["median"] >= GOAL else "MISSED"
    print(f"fraction of the disk's speed: {share['median']:.2f} (goal {GOAL}: {met})")
    print(f"losses equal those in memory: {'yes' if result['same_losses'] else 'NO'}")


if __name__ == "__main__":
    harness.start(main)
