"""Scale: what a rank takes as ranks grow in number, with real ranks and with 1,024 that move nothing.

    python -m benchmarks.scale [--ranks 2 4 8 16 32] [--worlds 8 64 256 1024] [--hosts 2 4]
        [--transports shm c10d hosts] [--steps 8] [--out FILE]

The one idea: counts (descriptors, mappings, threads, collectives, bytes) are exact, and say how things
grow; CPU times say how much of it there is. Real ranks are forked from one process that has imported
torch (scale_rank.py). A world that moves nothing is torch's own "fake" process group: one process is
rank 0, and what it gathers from the others is what it has itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.many_ranks import counter

MODULE = "benchmarks.scale_rank"
TRANSPORTS = ("shm", "c10d", "hosts")
LIMIT = 300.0  # seconds that one world may take

COLUMNS = {
    "ranks": "ranks",
    "hosts": "hosts",
    "transport": "transport",
    "cpu_us": "CPU us/unit/step",
    "group_us": "of it, group",
    "wrap_ms": "FSDP() CPU ms",
    "wrap_s": "FSDP() s",
    "torch_files": "torch's fds",
    "files": "fds",
    "maps": "mappings",
    "threads": "threads",
    "pss_kib": "PSS KiB",
    "memory": "memory() bytes",
    "transport_bytes": "of it, transport",
    "objects": "objects",
    "collectives": "collectives/step",
    "received": "KiB in/step",
    "turns": "of it, turns",
    "waits": "sleeps/step, all",
    "wakes": "wakes/step, all",
}
"""Key of a record -> heading. All but torch_files are what zshard adds to a rank."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8, 16, 32], metavar="N")
    parser.add_argument("--worlds", type=int, nargs="*", default=[8, 64, 256, 1024], metavar="N")
    parser.add_argument("--hosts", type=int, nargs="*", default=[2, 4], metavar="N")
    parser.add_argument("--transports", nargs="*", default=[*TRANSPORTS], choices=TRANSPORTS)
    parser.add_argument("--units", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, help="JSON of all records")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    records = [measure(args, *case) for case in real_cases(args)]
    show("Real ranks on this host", records)
    moved_by_none = [measure(args, "fake", world, 1) for world in args.worlds]
    show("Worlds that move nothing", moved_by_none)
    if args.out:
        harness.write_json(args.out, {"real": records, "fake": moved_by_none})


def real_cases(args: argparse.Namespace) -> Iterable[tuple[str, int, int]]:
    """Yield transport, ranks and hosts of each run."""
    for transport in args.transports:
        for ranks in args.ranks:
            if transport != "hosts":
                yield transport, ranks, 1
                continue
            for hosts in args.hosts:
                if ranks % hosts == 0 and ranks >= hosts:
                    yield transport, ranks, hosts


def measure(args: argparse.Namespace, transport: str, ranks: int, hosts: int) -> dict[str, Any]:
    """Return the record of one world: medians over its ranks."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="zshard-scale-") as folder:
        env = {
            **os.environ,
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks // hosts),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 joins this process's store
            "TORCHELASTIC_RESTART_COUNT": "0",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "LD_PRELOAD": str(counter()),
        }
        sizes = [f"--units={args.units}", f"--steps={args.steps}", f"--hosts={hosts}"]
        command = [sys.executable, "-m", MODULE, "--transport", transport, *sizes, folder]
        run = {"env": env, "cwd": harness.ROOT, "timeout": LIMIT, "capture_output": True}
        done = subprocess.run(command, text=True, **run)  # the profiler is talkative
        if done.returncode != 0:
            sys.exit(f"{ranks} ranks over {transport} failed:\n{done.stderr[-2000:]}")
        record: dict[str, Any] = json.loads(Path(folder, "found").read_text())
    return {"ranks": ranks, "hosts": hosts, **record}


def show(title: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Print a Markdown table of the columns that a record has."""
    if not records:
        return
    keys = [key for key in COLUMNS if any(record.get(key) is not None for record in records)]
    rows = [[text_of(record.get(key)) for key in keys] for record in records]
    print(f"\n{title}\n")
    for row in ([COLUMNS[key] for key in keys], ["---"] * len(keys), *rows):
        print("| " + " | ".join(row) + " |", flush=True)


def text_of(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 20 else f"{value:.3g}"
    return str(value)


if __name__ == "__main__":
    harness.start(main)
