"""Several hosts, made out of this machine: how far is each library from what the wire allows?

    python -m benchmarks.hosts [--layouts 2x1 2x2 4x1] [--gbit 10 1] [--models gpt10m stack100]
    python -m benchmarks.hosts --sides ddp zshard-full_shard-auto zshard-full_shard-auto-keep_true

Needs root (network namespaces); hosts_net.py makes the hosts, and nothing of them remains. A
layout is hosts x ranks of each. Sides take turns in one process group, as in step_time.py; peak
memory is measured with one side at a time. All hosts share this machine's cores: where a step is
bound by computing, its time says nothing about hosts with cores of their own, so compare with DDP's
of the same row, and bytes with the least that must travel.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness, memory, step_time
from benchmarks.harness import MIB, Spread
from benchmarks.hosts_net import Hosts, HostsUnavailable, run_ranks, wire_bytes
from benchmarks.models import WORKLOADS, Workload
from benchmarks.sides import SIDES, Side, build_side

MODULE = "benchmarks.hosts"
MODELS = ["gpt10m", "gpt85m", "bert", "stack100"]
OURS = [f"zshard-{name}-auto" for name in ("full_shard", "hybrid_shard", "shard_grad_op")]
USUAL = ["ddp", "fsdp2", *OURS]
QUIET = 0.1
"""Seconds until what is under way has arrived."""


def layout(text: str) -> tuple[int, int]:
    """Return (hosts, ranks of each) of a text like 2x1."""
    hosts, _, ranks = text.partition("x")
    if not (hosts.isdecimal() and ranks.isdecimal() and int(hosts) > 1 and int(ranks) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a layout: expected one like 2x1")
    return int(hosts), int(ranks)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    purpose = "Measure training on several hosts made out of this machine (needs root)."
    parser = harness.parser(purpose, rounds="timed steps per side (default: 5; with --quick: 2)")
    several: dict[str, Any] = {"nargs": "+", "metavar": ""}
    what = "hosts x ranks of each (default: 2x1 2x2 4x1; with --quick: 2x1)"
    parser.add_argument("--layouts", type=layout, help=what, **several)
    what = "Gbit/s of each host's link, 0 for no limit (default: 10 1)"
    parser.add_argument("--gbit", type=float, default=[10.0, 1.0], help=what, **several)
    what = f"of {', '.join(WORKLOADS)} (default: {' '.join(MODELS)}; with --quick: gpt10m)"
    parser.add_argument("--models", choices=WORKLOADS, help=what, **several)
    what = f"of {', '.join(SIDES)} (default: {' '.join(USUAL)})"
    parser.add_argument("--sides", choices=SIDES, default=USUAL, help=what, **several)
    parser.add_argument("--cell", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.layouts = args.layouts or [(2, 1), (2, 2), (4, 1)][: 1 if args.quick else 3]
    args.models = args.models or (["gpt10m"] if args.quick else MODELS)
    args.rounds = args.rounds or (2 if args.quick else 5)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if harness.under_torchrun():
        harness.measure_as_rank(args, lambda: measure(args.cell), lambda _: None)
        return
    results: list[dict[str, Any]] = []
    for count, ranks in args.layouts:
        for gbit in args.gbit:
            try:
                with Hosts(count, gbit) as hosts:
                    for record in records(args, hosts, ranks):
                        show(record)
                        results.append(record)
            except HostsUnavailable as error:
                raise SystemExit(f"cannot make hosts out of this machine: {error}") from None
    harness.finish(args, "hosts", results)


def records(args: argparse.Namespace, hosts: Hosts, ranks: int) -> Iterator[dict[str, Any]]:
    """Yield one record per model."""
    wire = {"hosts": len(hosts.all), "ranks_per_host": ranks, "gbit": hosts.gbit}
    wire["reached_gbit"] = hosts.reached_gbit()
    for model in args.models:
        cell = {"model": model, "rounds": args.rounds, "sides": args.sides}
        sides = collect(hosts, ranks, MODULE, [f"--cell={json.dumps(cell)}"])
        parameters = WORKLOADS[model].parameters()
        for name, side in sides.items():
            side["least_bytes"] = least_bytes(name, 4 * parameters, len(hosts.all))
            alone = [f"--cell={json.dumps({**cell, 'alone': name})}"]
            side["bytes"] = collect(hosts, ranks, MODULE, alone, memory.MALLOC)
        yield {**wire, "model": model, "parameters": parameters, "sides": sides}


PASSES = {"fsdp1": 3, "fsdp2": 3, "zshard-full_shard": 3}
"""Side -> how often its model's bytes go between hosts: a gather, for forward and again for
backward, and a reduction count one each, an all-reduce two. All others: two."""


def least_bytes(side: str, model_bytes: int, hosts: int) -> int:
    """Return the bytes that a host must receive, and send, in a float32 step of this strategy.

    Each host fetches what others have once and passes it on to its ranks, and adds up its ranks'
    gradients before it sends them. (A unit that forward uses last need not be gathered again, which
    is not counted here, nor are the units that keep_gathered="auto" keeps.)
    """
    strategy = "-".join(side.split("-")[:2])
    passes = 2 if side.endswith("-keep_true") else PASSES.get(strategy, 2)
    return passes * model_bytes * (hosts - 1) // hosts


def collect(
    hosts: Hosts, ranks: int, module: str, flags: Sequence[str], env: Mapping[str, str] = {}
) -> Any:
    """Run `module` on all ranks of the hosts; return what rank 0 wrote to --out."""
    with tempfile.TemporaryDirectory(prefix="zshard-bench-") as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", module, *flags, f"--out={out}"]
        run_ranks(hosts, ranks, command, env)
        return json.loads(out.read_text())


def show(record: Mapping[str, Any]) -> None:
    keys = ("peak", "held", "predicted")
    header = ["side", "ms", "x ddp min/med/max", "sent", "least", "sent / least", *keys]
    rows = []
    for name, side in record["sides"].items():
        sent, least = max(side["wire"]["sent"]), side["least_bytes"]
        row = [name, f"{side['ms']['median']:.0f}"]
        row.append(Spread(**side["ratio"]).text(2) if side["ratio"] else "")
        row += [f"{sent / 1e6:.1f}", f"{least / 1e6:.1f}", f"{sent / least:.2f}"]
        row += [f"{max(side['bytes'].get(key, [0])) / MIB:.0f}" for key in keys]
        rows.append([*row, str(side["loss_difference"])])
    title = (
        f"{record['model']}, {record['hosts']} hosts x {record['ranks_per_host']} ranks, "
        f"{record['gbit']:g} Gbit/s (0: no limit; one connection reaches "
        f"{record['reached_gbit']:.2f}); MB sent by a host, MiB of its ranks' memory"
    )
    harness.print_table(title, [*header, "loss - ddp's"], rows)


# --- on each rank --------------------------------------------------------------------------------


def measure(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Train with all sides in turn and return {side: record}, or the memory of one. Collective."""
    workload = WORKLOADS[cell["model"]]
    if "alone" in cell:
        return bytes_of_hosts(workload, cell["alone"])
    sides = {name: build_side(name, workload) for name in cell["sides"]}
    generator = harness.generator()
    batches = [workload.batch(generator) for _ in range(cell["rounds"] + 1)]
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in sides}

    def turn(side: Side, number: int) -> tuple[float]:
        begin = time.perf_counter()
        loss = side.step(batches[number])
        seconds = time.perf_counter() - begin
        losses[side.name].append(loss)
        return (seconds,)

    turns = {name: partial(turn, side) for name, side in sides.items()}
    samples = harness.interleave(turns, cell["rounds"], 1)
    curves = {name: torch.stack(values) for name, values in losses.items()}
    found = {}
    for name, side in sides.items():
        difference = step_time.loss_difference(curves, side)
        found[name] = step_time.summarize(workload.name, name, samples, difference)
        found[name]["wire"] = bytes_between(partial(side.step, batches[-1]))
    return found


def of_hosts(mine: Any) -> list[list[Any]]:
    """Return what the ranks of each host have. Collective."""
    ranks, count = harness.of_all_ranks(mine), int(os.environ["LOCAL_WORLD_SIZE"])
    return [ranks[start : start + count] for start in range(0, len(ranks), count)]


def bytes_between(act: Callable[[], Any]) -> dict[str, list[int]]:
    """Return the bytes that each host receives and sends while its ranks act. Collective.

    The counters of the host's interface are read before and after, with all ranks quiet.
    """
    dist.barrier()
    time.sleep(QUIET)
    before = wire_bytes()
    dist.barrier()
    act()
    dist.barrier()
    time.sleep(QUIET)
    hosts = of_hosts([now - then for now, then in zip(wire_bytes(), before, strict=True)])
    return {key: [host[0][i] for host in hosts] for i, key in enumerate(("received", "sent"))}


def settled() -> int:
    """Return this rank's PSS while all ranks are idle. Collective."""
    gc.collect()
    memory.trim()
    dist.barrier()
    time.sleep(1)  # what a deleted model had is released a moment later
    dist.barrier()
    return memory.pss()


def bytes_of_hosts(workload: Workload, name: str) -> dict[str, Any]:
    """Return the bytes of each host's ranks: "peak" and "held" with gradients after a few steps,
    both beyond what a small model has left of the libraries, and "predicted" by zshard. Collective.

    What zshard holds with gradients is all that it predicts; activations are in the peak alone.
    """
    build_side(name, WORKLOADS[memory.TINY]).step(WORKLOADS[memory.TINY].batch(harness.generator()))
    before = settled()
    side: Any = build_side(name, workload)
    generator, sampler = harness.generator(), memory.PssSampler()
    for _ in range(4):  # keep_gathered="auto" decides in the second; the third has what stays
        side.zero_grad()
        side.step(workload.batch(generator), zero_grad=False)
        sampler.sample()
    found = {"peak": sampler.stop() - before, "held": settled() - before}
    if hasattr(side.module, "memory"):
        found["predicted"] = side.module.memory("predicted")["total"]
    return {key: [sum(host) for host in of_hosts(mine)] for key, mine in found.items()}


if __name__ == "__main__":
    harness.start(main)
