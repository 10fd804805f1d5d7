"""Scale: what a rank takes as ranks grow in number: real ranks, and 1,024 that move nothing.

    python -m benchmarks.scale [--ranks 2 4 8 16 32] [--worlds 8 64 256 1024] [--hosts 2 4]
        [--transports shm c10d hosts] [--steps 8] [--limit 120] [--out FILE]

Counts (descriptors, mappings, threads, collectives, bytes) are exact, and say how
things grow; CPU times say how much of it there is. Real ranks are forked from one process that has
imported torch (scale_rank.py). A world that moves nothing is torch's own "fake" process group: one
process is rank 0, and what it gathers from the others is what it has itself. A row is printed, and
appended to --out as a line of JSON, when it is finished, so a run that is cut off has the rows it
came to.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import forked, harness

MODULE = "benchmarks.scale_rank"
TRANSPORTS = ("shm", "c10d", "hosts")
ENOUGH = 64  # steps of all ranks together: worlds of more ranks take fewer steps each, but 2

COLUMNS = {
    "ranks": "ranks",
    "hosts": "hosts",
    "transport": "transport",
    "steps": "steps",
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
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that one row may take")
    parser.add_argument("--out", type=Path, help="to append a line of JSON to for each row")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    show("Real ranks on this host", args, list(real_cases(args)))
    show("Worlds that move nothing", args, [("fake", world, 1) for world in args.worlds])


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
    """Return the record of one world: medians over its ranks, or why there are none."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    steps = args.steps if transport == "fake" else min(args.steps, max(2, ENOUGH // ranks))
    found: dict[str, Any] = {"ranks": ranks, "hosts": hosts, "transport": transport, "steps": steps}
    with tempfile.TemporaryDirectory(prefix="zshard-scale-") as folder:
        env = forked.environment(store.port, ranks, ranks // hosts)
        sizes = [f"--units={args.units}", f"--steps={steps}", f"--hosts={hosts}"]
        command = [sys.executable, "-m", MODULE, "--transport", transport, *sizes, folder]
        failed = run(command, env, args.limit)
        if failed:
            return {**found, "failed": failed}
        return {**found, **json.loads(Path(folder, "found").read_text())}


def run(command: Sequence[str], env: Mapping[str, str], limit: float) -> str:
    """Run a world's processes; return why they failed, or "". None is left when this returns."""
    with tempfile.TemporaryFile("w+") as said:  # the profiler is talkative
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said}
        began = subprocess.Popen(
            command, env=env, cwd=harness.ROOT, start_new_session=True, **pipes
        )
        try:
            if began.wait(limit) == 0:
                return ""
            said.seek(0)
            print(said.read()[-2000:], file=sys.stderr)
            return f"failed: {began.returncode}"
        except subprocess.TimeoutExpired:
            return f"not ended in {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(began.pid, signal.SIGKILL)  # the ranks are of its session
            began.wait()


def show(title: str, args: argparse.Namespace, cases: Sequence[tuple[str, int, int]]) -> None:
    """Measure the cases, and print a row of a Markdown table for each as it is finished."""
    if not cases:
        return
    print(f"\n{title}\n")
    for row in (COLUMNS.values(), ["---"] * len(COLUMNS)):
        print("| " + " | ".join(row) + " |", flush=True)
    for case in cases:
        record = measure(args, *case)
        keys = [key for key in COLUMNS if key in record or "failed" not in record]
        row = [*(text_of(record.get(key)) for key in keys), *filter(None, [record.get("failed")])]
        print("| " + " | ".join(row) + " |", flush=True)
        if args.out:
            with args.out.open("a") as out:
                out.write(json.dumps(record) + "\n")


def text_of(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 20 else f"{value:.3g}"
    return str(value)


if __name__ == "__main__":
    harness.start(main)
