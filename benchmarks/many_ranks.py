"""Many ranks on one host: what each takes of its limits, and futex calls and time of a step.

    python -m benchmarks.many_ranks [--ranks 8 16 32] [--units 100] [--mixed] [--unprivileged]
        [--open-files 1024] [--save]

The ranks are forked from one process that has imported torch, so that dozens start within seconds.
With more ranks than cores, times say how ranks get into each other's way, not how fast hardware is.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import forked

WIDTH = 32
CAPABILITIES = 0x20080522  # of version 3
WARMUP = 3


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32], metavar="N")
    parser.add_argument("--units", type=int, default=100)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--mixed", action="store_true", help="mixed precision (bfloat16)")
    parser.add_argument("--unprivileged", action="store_true", help="ranks drop all capabilities")
    parser.add_argument("--open-files", type=int, help="the ranks' limit of open files")
    parser.add_argument("--save", action="store_true", help="save a checkpoint, twice")
    parser.add_argument("--fork", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if args.fork:
        fork_all(args)
        return
    print("ranks  transport  files  mappings  MiB mapped  waits  wakes  ms/step  s to wrap")
    for world in args.ranks:
        found = measure(args, world)
        each = "  ".join(str(found[key]) for key in ("transport", "files", "mappings", "mapped"))
        times = f"{found['ms']:.1f}  {found['wrap']:.1f}"
        print(f"{world}  {each}  {found['waits']:.0f}  {found['wakes']:.0f}  {times}", flush=True)


def measure(args: argparse.Namespace, world: int) -> dict[str, Any]:
    """Return what rank 0 has found of `world` ranks, with the futex calls of all."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        env = forked.environment(store.port, world, world)
        command = [sys.executable, "-m", "benchmarks.many_ranks", *sys.argv[1:], "--fork", folder]
        if subprocess.run(command, env=env).returncode != 0:
            sys.exit(f"{world} ranks failed")
        found: dict[str, Any] = json.loads(Path(folder, "found").read_text())
    return found


def fork_all(args: argparse.Namespace) -> None:
    """Import torch once, fork the ranks, and exit with 1 if one of them fails."""
    import torch

    import zshard  # noqa: F401

    torch.set_num_threads(1)

    def run(_: int) -> None:
        limit(args)
        run_rank(args)

    forked.fork_ranks(run)


def limit(args: argparse.Namespace) -> None:
    """Give up what the arguments say."""
    if args.open_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (args.open_files, args.open_files))
    if args.unprivileged:
        libc = ctypes.CDLL(None, use_errno=True)
        none = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, twice 32 bits
        if libc.capset((ctypes.c_uint32 * 2)(CAPABILITIES, 0), none) != 0:
            raise OSError(ctypes.get_errno(), "capset")


def run_rank(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    import zshard
    from zshard import FSDP, MixedPrecision
    from zshard.units.units import state_of

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(args.units)])
    precision = MixedPrecision(torch.bfloat16) if args.mixed else None
    start = time.perf_counter()
    model = FSDP(
        model, auto_wrap_policy={nn.Linear}, transport=args.transport, mixed_precision=precision
    )
    wrap = time.perf_counter() - start
    optimizer = zshard.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH)).sum().backward()
        optimizer.step()

    for _ in range(WARMUP):
        step()
    dist.barrier()
    before, start = forked.futex_calls(), time.perf_counter()
    for _ in range(args.steps):
        step()
    seconds = time.perf_counter() - start
    calls = torch.tensor(forked.futex_calls()) - torch.tensor(before)
    dist.all_reduce(calls)
    if args.save:
        for name in ("first", "second"):
            zshard.save(Path(args.fork, name), model, optimizer)
    if dist.get_rank() == 0:
        waits, wakes = (calls.double() / args.steps).tolist()
        found = {
            "transport": state_of(model).comms.all.transport,
            "files": len(os.listdir("/proc/self/fd")) - 1,
            "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
            "mapped": int(Path("/proc/self/statm").read_text().split()[0]) * 4096 >> 20,
            "waits": waits,
            "wakes": wakes,
            "ms": 1e3 * seconds / args.steps,
            "wrap": wrap,
        }
        Path(args.fork, "found").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main()
