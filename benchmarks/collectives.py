"""Collectives: the shm transport alone, compared with gloo and memcpy.

    python -m benchmarks.collectives [--ranks 2 4] [--mib 0.0625 1 16 64 256] [--rounds 12]

Over shm an all-gather moves no bytes: `unshard` only grants access to the peers' memory. So reading
is measured as well: `copy` copies the full buffer out of the mapping, `memcpy` the same number of
bytes within one process. For the reduction, `copy` moves the bytes that it has to fetch, without
summing them.

Before each operation the owner rewrites the memory that its peers will read, followed by a barrier;
neither is timed. A sample is the mean of several operations on the slowest rank.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.harness import Turn

MODULE = "benchmarks.collectives"
# The sources of shm, which need only libc. comm_dry.c names all transports.
SOURCES = ["base/*.c", "comm/*.c", "comm/shm/*.c", "device/device.c", "device/*_cpu.c"]
FLAGS = "-std=c11 -Wall -Werror -O3 -DNDEBUG -fno-math-errno -ffp-contract=off -pthread"

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SAMPLE = 0.15
"""Target duration of a sample in seconds, including preparation."""

SIDES = {"gather": ("gloo", "copy", "memcpy", "unshard"), "reduce": ("gloo", "shm", "copy")}
PAIRS = {
    "gather": [("gloo", "copy"), ("copy", "memcpy"), ("gloo", "unshard")],
    "reduce": [("gloo", "shm"), ("shm", "copy")],
}
OPERATIONS = {
    ("gather", "copy"): "copy_mapped",
    ("gather", "memcpy"): "copy_private",
    ("gather", "unshard"): "unshard",
    ("reduce", "shm"): "reduce",
    ("reduce", "copy"): "copy_slices",
}
TARGETS = {"gather": ("gloo/copy", 8.0), "reduce": ("gloo/shm", 12.0)}
"""Operation -> the smallest ratio that is allowed at 1 and 16 MiB."""

# torch 2.13 renamed its collectives and warns about the old names.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


FULL = {"ranks": [2, 4], "rounds": 12, "warmup": 1, "mib": [0.0625, 1.0, 16.0, 64.0, 256.0]}
QUICK = {"rounds": 3, "mib": [0.0625, 16.0]}


def main(argv: Sequence[str] | None = None) -> None:
    if harness.under_torchrun():
        harness.run_task(measure_all, show)
    purpose = "Time all-gather and reduce-scatter over shm, gloo and memcpy."
    args = harness.options(purpose, argv, FULL, QUICK)
    library = build(harness.ROOT / "build" / "benchmarks")
    task = {"library": str(library), "rounds": args.rounds, "warmup": args.warmup, "mib": args.mib}
    results = [part for ranks in args.ranks for part in harness.collect(MODULE, ranks, task)]
    harness.finish(args, "collectives", results)


def build(folder: Path) -> Path:
    """Compile the transport and its driver; return the library's path."""
    source = harness.ROOT / "csrc"
    files = [harness.ROOT / "benchmarks" / "collectives_driver.c"]
    files += [path for name in SOURCES for path in source.glob(name) if path.stem != "comm_dry"]
    target = folder / "collectives_driver.so"
    folder.mkdir(parents=True, exist_ok=True)
    compiler = shlex.split(f"{os.environ.get('CC', 'cc')} {FLAGS} -shared -fPIC -Wl,-z,defs")
    command = [*compiler, f"-iquote{source}", *map(str, files), "-lm", "-o", str(target)]
    subprocess.run(command, check=True)
    return target


class Driver:
    """collectives_driver.c on this rank, connected to its peers. Collective."""

    def __init__(self, path: str) -> None:
        self._lib = ctypes.CDLL(path)
        pointer, text = ctypes.c_void_p, ctypes.c_char_p
        for name, result, arguments in [
            ("error", text, []),
            ("open", pointer, [ctypes.c_int, ctypes.c_int, text]),
            ("connect", ctypes.c_int, [pointer, ctypes.POINTER(text)]),
            ("barrier", ctypes.c_int, [pointer]),
            ("new", pointer, [pointer, ctypes.c_size_t, ctypes.c_int]),
            ("free", None, [pointer]),
            ("run", ctypes.c_double, [pointer, text, ctypes.c_int]),
        ]:
            function = getattr(self._lib, f"zsb_{name}")
            function.restype, function.argtypes = result, arguments
        world = dist.get_world_size()
        address = ctypes.create_string_buffer(128)
        self._comm = self._lib.zsb_open(dist.get_rank(), world, address)
        self._check(self._comm is not None)
        addresses = harness.of_all_ranks(address.value)
        self._check(self._lib.zsb_connect(self._comm, (text * world)(*addresses)) == 0)

    def barrier(self) -> None:
        """Wait for all ranks: microseconds, where gloo's barrier takes up to a millisecond."""
        self._check(self._lib.zsb_barrier(self._comm) == 0)

    def memory(self, nbytes: int, bfloat16: bool) -> int:
        """Allocate the buffers for one size; release them with free(). Collective."""
        made: int | None = self._lib.zsb_new(self._comm, nbytes, bfloat16)
        if made is None:
            raise self._error()
        return made

    def free(self, memory: int) -> None:
        self._lib.zsb_free(memory)

    def run(self, memory: int, operation: str, count: int) -> float:
        """Run an operation `count` times and return its mean seconds."""
        seconds: float = self._lib.zsb_run(memory, operation.encode(), count)
        self._check(seconds >= 0)
        return seconds

    def _check(self, good: bool) -> None:
        if not good:
            raise self._error()

    def _error(self) -> SystemExit:
        return SystemExit(f"shm transport: {self._lib.zsb_error().decode()}")


def gloo_turn(driver: Driver, what: str, nbytes: int, dtype: torch.dtype) -> Callable[[int], float]:
    """Return a function that times torch's collective over gloo, prepared like the driver's."""
    full = torch.zeros(nbytes // dtype.itemsize, dtype=dtype)
    part = torch.zeros(full.numel() // dist.get_world_size(), dtype=dtype)
    gather = what == "gather"

    def run(count: int) -> float:
        total = 0.0
        for _ in range(count):
            (part if gather else full).zero_()
            driver.barrier()
            start = time.perf_counter()
            if gather:
                all_gather(full, part)
            else:
                reduce_scatter(part, full)
            total += time.perf_counter() - start
        return total / count

    return run


def repeated(run: Callable[[int], float]) -> Turn:
    """Return a turn of all the operations that fit into SAMPLE; the same number on all ranks."""
    start = time.perf_counter()
    run(2)  # the first touch of memory, and gloo's first connection
    run(2)
    each = torch.tensor([(time.perf_counter() - start) / 4], dtype=torch.float64)
    dist.all_reduce(each, dist.ReduceOp.MAX)
    count = max(2, min(2000, int(SAMPLE / each.item())))
    return lambda number: (run(count),)


def measure_all(library: str, rounds: int, warmup: int, mib: list[float]) -> list[dict[str, Any]]:
    """Return a record of each operation and dtype, for any number of ranks."""
    driver, results = Driver(library), []
    for what, dtype in (("gather", "fp32"), ("reduce", "fp32"), ("reduce", "bf16")):
        sizes = [
            measure(driver, what, dtype, int(each * harness.MIB), rounds, warmup) for each in mib
        ]
        table = {"what": what, "dtype": dtype, "ranks": dist.get_world_size()}
        results.append({**table, "sizes": sizes})
    return results


def measure(
    driver: Driver, what: str, dtype: str, nbytes: int, rounds: int, warmup: int
) -> dict[str, Any]:
    """Time all sides at one size and return the JSON record. Collective."""
    memory = driver.memory(nbytes, dtype == "bf16")
    turns: dict[str, Turn] = {}
    for side in SIDES[what]:
        if side == "gloo":
            turns[side] = repeated(gloo_turn(driver, what, nbytes, DTYPES[dtype]))
        else:
            turns[side] = repeated(driver_turn(driver, memory, OPERATIONS[what, side]))
    samples = harness.interleave(turns, rounds, warmup)
    driver.free(memory)
    us = {
        name: harness.spread([taken[i].times[0] * 1e6 for i in harness.clean_rounds(taken)])
        for name, taken in samples.items()
    }
    ratios = {
        f"{slow}/{fast}": harness.spread(harness.same_round_ratios(samples[slow], samples[fast]))
        for slow, fast in PAIRS[what]
    }
    record = {"bytes": nbytes, "us": us, "ratios": ratios}
    pair, least = TARGETS[what]
    if nbytes in (harness.MIB, 16 * harness.MIB):
        met = ratios[pair]["median"] >= least
        record["verdict"] = f"{pair} >= {least:g}: {'met' if met else 'MISSED'}"
    return record


def driver_turn(driver: Driver, memory: int, operation: str) -> Callable[[int], float]:
    return lambda count: driver.run(memory, operation, count)


def show(results: Sequence[dict[str, Any]]) -> None:
    for each in results:
        sizes = {f"{size['bytes'] / harness.MIB:g} MiB": size for size in each["sizes"]}
        harness.show(f"{each['what']} of {each['dtype']}, {each['ranks']} ranks", sizes)


if __name__ == "__main__":
    harness.start(main)
