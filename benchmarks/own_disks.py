"""Checkpoints of hosts that share no disk: rates, bytes on the wire, and a lost host.

    python -m benchmarks.own_disks [--hosts 2] [--gbit 10] [--rounds 5]

Each host is a set of namespaces of this machine (hosts_net.py) with a folder of its own at one
path, which it alone can see. The state (parameters and Adam moments, about 1 GB) is sharded over
all hosts. Saves sync; loads read from the page cache; collect gives each host all parts.
Bytes are counted at the network interface of each host.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.checkpoint import MODELS, Block, build
from benchmarks.hosts_net import INTERFACE, Hosts, run_ranks

PLACE = "/mnt"
"""Where each host mounts its own folder."""

CASES = ("save", "load", "collect", "load, all parts here")


def wire_bytes() -> int:
    """Return the bytes that this host has sent."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counts.split()[8])
    raise SystemExit(f"this host has no interface {INTERFACE}")


# --------------------------------------------------------------------------------------
# A rank's part


class Run:
    """A model and its optimizer after one step."""

    def __init__(self, model: str) -> None:
        import zshard

        self.zshard = zshard
        self.model = zshard.FSDP(build(model), auto_wrap_policy={Block})
        self.optimizer = zshard.AdamW(self.model.parameters())
        self.model(torch.randn(1, MODELS[model][1])).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        params = list(self.model.parameters())
        states = [self.optimizer.state[p] for p in params]
        moments = [s[key] for s in states for key in ("exp_avg", "exp_avg_sq")]
        self.own = [zshard.to_local(t).detach() for t in (*params, *moments)]
        self.wanted = [tensor.clone() for tensor in self.own]

    def save(self, path: str) -> None:
        self.zshard.save(path, self.model, self.optimizer, per_host=True)

    def collect(self, path: str) -> None:
        from zshard.extras.per_host.collect import collect

        collect([path])

    def load(self, path: str) -> None:
        self.zshard.load(path, self.model, self.optimizer)

    def check(self) -> None:
        if not all(torch.equal(a, b) for a, b in zip(self.own, self.wanted, strict=True)):
            raise AssertionError("load() returned other values than were saved")


def timed(action: Callable[[], None]) -> dict[str, float]:
    """Return the seconds of an action on all ranks, and the bytes that this host sent in it."""
    dist.barrier()
    before, start = wire_bytes(), time.perf_counter()
    action()
    dist.barrier()
    return {"seconds": time.perf_counter() - start, "sent": float(wire_bytes() - before)}


def timed_load(run: Run, path: str) -> dict[str, float]:
    for tensor in run.own:
        tensor.fill_(7.0)
    found = timed(lambda: run.load(path))
    run.check()
    return found


def one_round(run: Run, folder: Path) -> dict[str, dict[str, float]]:
    """Save, load and collect."""
    path = folder / "one"
    os.sync()
    found = {"save": timed(lambda: run.save(str(path)))}
    found["load"] = timed_load(run, str(path))
    os.sync()
    found["collect"] = timed(lambda: run.collect(str(path)))
    found["load, all parts here"] = timed_load(run, str(path))
    shutil.rmtree(path)
    dist.barrier()
    return found


def lost(run: Run, folder: Path) -> str:
    """Return the error of a load after the last host has lost its disk."""
    run.save(str(folder / "lost"))
    if dist.get_rank() == dist.get_world_size() - 1:
        shutil.rmtree(folder / "lost")
    try:
        run.load(str(folder / "lost"))
    except ValueError as error:
        return str(error)
    raise AssertionError("load() did not notice that a host is gone")


def measure_as_rank(args: argparse.Namespace) -> None:
    with harness.process_group() as rank:
        run = Run(args.model)
        rounds = []
        for number in range(args.rounds + 1):  # the first one warms up
            mine = one_round(run, Path(PLACE))
            ranks = harness.of_all_ranks(mine)
            rounds.append(
                {
                    name: {
                        "seconds": max(each[name]["seconds"] for each in ranks),
                        "sent": sum(each[name]["sent"] for each in ranks),
                    }
                    for name in CASES
                }
            )
            harness.progress(number, args.rounds)
        error = lost(run, Path(PLACE))
        own = sum(t.numel() * t.element_size() for t in run.own)
        size = sum(harness.of_all_ranks(own))
    if rank == 0:
        harness.write_json(args.out, {"rounds": rounds[1:], "bytes": size, "error": error})
    sys.stdout.flush()
    os._exit(0)  # torch's process groups sometimes abort at interpreter exit


# --------------------------------------------------------------------------------------
# The comparison


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    purpose = "Save and load on hosts that share no disk."
    parser = harness.parser(purpose, rounds="rounds (default: 5; with --quick: 1)")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--gbit", type=float, nargs="+", default=[10.0, 0.0], help="0: no limit")
    parser.add_argument("--model", choices=MODELS)
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (1 if args.quick else 5)
    args.model = args.model or ("tiny" if args.quick else "large")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if harness.under_torchrun():
        measure_as_rank(args)
        return
    results = [measured(args, gbit) for gbit in args.gbit]
    harness.finish(args, "own-disks", results)


def measured(args: argparse.Namespace, gbit: float) -> dict[str, Any]:
    """Run all cases on hosts with links of a rate, and show them."""
    with tempfile.TemporaryDirectory(prefix="zshard-bench-") as folder:
        out = Path(folder, "found.json")
        with Hosts(args.hosts, gbit) as hosts:
            for host in hosts.all:
                own = Path(folder, host.name)
                own.mkdir()
                host.call("mount", "--bind", str(own), PLACE)
            reached = hosts.reached_gbit()
            command = [sys.executable, "-m", "benchmarks.own_disks", "--out", str(out)]
            command += ["--rounds", str(args.rounds), "--model", args.model]
            run_ranks(hosts, 1, command, {})
        found = json.loads(out.read_text())
    cases = {
        name: {
            key: median(each[name][key] for each in found["rounds"]) for key in ("seconds", "sent")
        }
        for name in CASES
    }
    size = found["bytes"]
    rows = [
        [
            name,
            f"{case['seconds']:.2f}",
            f"{size / case['seconds'] / 2**30:.2f}",
            f"{case['sent'] / 2**20:,.0f}",
            f"{case['sent'] / size:.2f}",
        ]
        for name, case in cases.items()
    ]
    title = f"{args.hosts} hosts, {size / 1e9:.2f} GB of state, {reached:.1f} Gbit/s reached"
    harness.print_table(title, ["", "s", "GiB/s", "MiB on the wire", "of the state"], rows)
    print(f"a lost host: {found['error']}\n")
    return {
        **{"hosts": args.hosts, "gbit": gbit, "reached_gbit": reached, "bytes": size},
        **{"cases": cases, "rounds": found["rounds"], "lost": found["error"]},
    }


if __name__ == "__main__":
    harness.start(main)
