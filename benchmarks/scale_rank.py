"""A rank's part of scale.py: trains a small model, and counts what zshard has added to the process.

Everything is counted twice, before FSDP() and after the steps, and the difference is
zshard's. The plain model is trained before, so that what torch makes on first use is there already.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zshard
from benchmarks import forked, harness
from zshard import FSDP

WIDTH = 64
WARMUP = 3
COUNTED = {
    "c10d::_allgather_base_": "gather",
    "c10d::alltoall_base_": "swap",
    "c10d::broadcast_": "broadcast",
    "c10d::scatter_": "scatter",
    "c10d::allgather_": "list",
}
TURN = 280  # bytes that a rank says before a collective: sizeof(zs_turn)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run by benchmarks.scale.")
    parser.add_argument("--transport", required=True)
    parser.add_argument("--units", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.transport == "fake":
        Path(args.folder, "found").write_text(json.dumps(measure_fake(args)))
    else:
        fork_all(args)


def fork_all(args: argparse.Namespace) -> None:
    """Fork the ranks, on as many pretended hosts."""
    world = int(os.environ["WORLD_SIZE"])

    def run(rank: int) -> None:
        if args.hosts > 1:
            os.environ["ZSHARD_HOST"] = f"host{rank * args.hosts // world}"
        run_rank(args)

    forked.fork_ranks(run)


def run_rank(args: argparse.Namespace) -> None:
    before = len(os.listdir("/proc/self/fd"))
    dist.init_process_group("gloo")
    dist.barrier()
    torch_files = len(os.listdir("/proc/self/fd")) - before
    own = {"torch_files": torch_files, **measure(args, args.transport)}
    everyone = harness.of_all_ranks(own)
    if dist.get_rank() == 0:
        Path(args.folder, "found").write_text(json.dumps(medians(everyone)))
    dist.barrier()


def measure_fake(args: argparse.Namespace) -> dict[str, Any]:
    """Rank 0 of a world whose others are not there: torch's process group for this."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    return {**measure(args, "c10d"), "transport": "fake"}


def medians(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Of ranks' records: sums of what is counted for all ranks, medians of the rest."""
    found: dict[str, Any] = dict(records[0])
    for key, value in records[0].items():
        values = [record[key] for record in records]
        if key in ("waits", "wakes"):
            found[key] = float(sum(values))
        elif not isinstance(value, str | None):
            found[key] = type(value)(statistics.median(values))
    return found


# --- counting ------------------------------------------------------------------------------------


def counts() -> dict[str, int]:
    """What this process has of the kernel, and how many objects Python's collector knows."""
    gc.collect()
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return {
        "files": len(os.listdir("/proc/self/fd")) - 1,
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "threads": len(os.listdir("/proc/self/task")),
        "pss_kib": next(int(line.split()[1]) for line in rollup if line.startswith("Pss:")),
        "objects": len(gc.get_objects()),
    }


def measure(args: argparse.Namespace, transport: str) -> dict[str, Any]:
    """Train, and return what zshard added. Collective."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(args.units)])
    plain = cpu_per_step(model, torch.optim.AdamW(model.parameters()), args.steps)
    model.zero_grad()
    before = counts()
    wall, cpu = time.perf_counter(), time.process_time()
    model = FSDP(model, auto_wrap_policy={nn.Linear}, transport=transport)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    optimizer = zshard.AdamW(model.parameters())
    calls = forked.futex_calls()
    sharded = cpu_per_step(model, optimizer, args.steps)
    calls = [now - then for now, then in zip(forked.futex_calls(), calls, strict=True)]
    after = counts()
    memory = model.memory()
    seen = collectives(model, optimizer)
    return {
        "transport": transport,
        "cpu_us": 1e6 * (sharded - plain) / args.units,
        "group_us": group_time(seen) * 1e6 / args.units if transport == "c10d" else None,
        "wrap_ms": 1e3 * cpu,
        "wrap_s": wall,
        **{key: after[key] - before[key] for key in before},
        "memory": memory["total"],
        "transport_bytes": memory["transport"],
        "collectives": len(seen),
        # Over hosts most are lists of tensors, of which the profiler records no sizes.
        "received": None if transport == "hosts" else sum(bytes_in(*each) for each in seen) / 1024,
        "turns": sum(bytes_in(*each) for each in seen if each[1] == TURN) / 1024,
        "waits": calls[0] / (args.steps + WARMUP),
        "wakes": calls[1] / (args.steps + WARMUP),
    }


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, WIDTH)).sum().backward()
    optimizer.step()


def cpu_per_step(model: Any, optimizer: Any, steps: int) -> float:
    """Seconds of CPU time of all threads in forward and backward: the median of so many steps."""
    times = []
    for _ in range(WARMUP + steps):
        optimizer.zero_grad()
        begin = time.process_time()
        model(torch.ones(4, WIDTH)).sum().backward()
        times.append(time.process_time() - begin)
        optimizer.step()
    return statistics.median(times[WARMUP:])


def collectives(model: Any, optimizer: Any) -> list[tuple[str, int]]:
    """The collectives of process groups in a step: kind, and bytes that this rank brings."""
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # hosts begins them
    with torch.profiler.profile(record_shapes=True, experimental_config=config) as profile:
        step(model, optimizer)
    found = []
    for event in profile.events():
        kind = COUNTED.get(event.name)
        if kind:
            sizes = [shape[0] for shape in event.input_shapes if len(shape) == 1]
            found.append((kind, min(sizes, default=0)))  # of a list of tensors none are recorded
    return found


def bytes_in(kind: str, own: int) -> int:
    """Bytes that come from other ranks; a swap's own bytes are those for all ranks."""
    world = dist.get_world_size()
    return own * (world - 1) if kind == "gather" else own * (world - 1) // world


def group_time(seen: list[tuple[str, int]]) -> float:
    """Seconds of CPU time that the process group alone takes for these collectives."""
    world, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    best = []
    for _ in range(5):
        total = 0.0
        for kind, own in seen:
            mine = torch.zeros(own, dtype=torch.uint8)
            all_of_them = torch.zeros(own * world if kind == "gather" else own, dtype=torch.uint8)
            begin = time.process_time()
            if kind == "gather":
                group._allgather_base(all_of_them, mine).wait()
            else:
                group.alltoall_base(all_of_them, mine, [], []).wait()
            total += time.process_time() - begin
        best.append(total)
    return statistics.median(best)


if __name__ == "__main__":
    harness.start(main)
