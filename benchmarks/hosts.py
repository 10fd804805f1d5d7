"""Several hosts, made out of this machine: how far is each library from the limit of the wire?

    python -m benchmarks.hosts [--layouts 2x1 2x2 4x1] [--gbit 10 1] [--models gpt10m stack100]
    python -m benchmarks.hosts --sides ddp zshard-full_shard-auto zshard-full_shard-auto-keep_true

Needs root (network namespaces); hosts_net.py makes the hosts, and nothing of them remains. A
layout is hosts x ranks of each. Sides take turns in one process group, as in step_time.py; peak
memory is measured with one side at a time. All hosts share this machine's cores: where a step is
bound by computing, its time says nothing about hosts with their own cores, so compare with DDP's
of the same row, and bytes with the least that must travel.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks import harness, memory, step_time
from benchmarks.hosts_net import Hosts, HostsUnavailable, run_ranks, wire_bytes
from benchmarks.models import WORKLOADS, Batch, Workload
from benchmarks.sides import SIDES, Side, build_side

MODULE = "benchmarks.hosts"
MODELS = ["gpt10m", "gpt85m", "bert", "stack100"]
OURS = [f"zshard-{name}-auto" for name in ("full_shard", "hybrid_shard", "shard_grad_op")]
USUAL = ["ddp", "fsdp2", *OURS]
FULL = {"layouts": ["2x1", "2x2", "4x1"], "gbit": [10.0, 1.0], "models": MODELS, "sides": USUAL}
FULL |= {"rounds": 5}
QUICK = {"layouts": ["2x1"], "models": ["gpt10m"], "rounds": 2}

QUIET = 0.1
"""Seconds until what is under way has arrived."""


def layout(text: str) -> tuple[int, int]:
    """Return (hosts, ranks of each) of a text like 2x1."""
    hosts, _, ranks = text.partition("x")
    if not (hosts.isdecimal() and ranks.isdecimal() and int(hosts) > 1 and int(ranks) > 0):
        raise SystemExit(f"{text!r} is not a layout: expected one like 2x1")
    return int(hosts), int(ranks)


def main(argv: Sequence[str] | None = None) -> None:
    if harness.under_torchrun():
        harness.run_task(measure)
    purpose = "Measure training on several hosts made out of this machine (needs root)."
    args = harness.options(purpose, argv, FULL, QUICK, {"models": WORKLOADS, "sides": SIDES})
    results: list[dict[str, Any]] = []
    for count, ranks in map(layout, args.layouts):
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
        task = {"model": model, "names": args.sides, "rounds": args.rounds}
        record = collect(hosts, ranks, MODULE, task)
        for name, side in record["sides"].items():
            side["least_bytes"] = least_bytes(name, 4 * record["parameters"], len(hosts.all))
            alone = {**task, "alone": name}
            side["bytes"] = collect(hosts, ranks, MODULE, alone, memory.MALLOC)
        yield {**wire, **record}


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
    hosts: Hosts, ranks: int, module: str, task: Mapping[str, Any], env: Mapping[str, str] = {}
) -> Any:
    """Run `module` on all ranks of the hosts; return rank 0's output in --out."""
    with tempfile.TemporaryDirectory(prefix="zshard-bench-") as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", module, "--task", json.dumps(task), f"--out={out}"]
        run_ranks(hosts, ranks, command, env)
        return json.loads(out.read_text())


def show(record: Mapping[str, Any]) -> None:
    rows = {}
    for name, side in record["sides"].items():
        sent = max(side["wire"]["sent"])
        row = {"ms": side["ms"], "x ddp": side["ratio"], "sent_bytes": sent}
        row |= {"least_bytes": side["least_bytes"], "sent / least": sent / side["least_bytes"]}
        row |= {f"{key}_bytes": max(hosts) for key, hosts in side["bytes"].items()}
        rows[name] = {**row, "loss - ddp's": side["loss_difference"]}
    size = f"{record['model']}, {record['hosts']} hosts x {record['ranks_per_host']} ranks"
    wire = f"{record['gbit']:g} Gbit/s (0: no limit), one connection {record['reached_gbit']:.2f}"
    harness.show(f"{size}, {wire}; sent by a host, memory of its ranks", rows)


# --- on each rank --------------------------------------------------------------------------------


def measure(model: str, names: Sequence[str], rounds: int, alone: str = "") -> dict[str, Any]:
    """Train with all sides in turn and return the record, or the memory of one. Collective."""
    if alone:
        return bytes_of_hosts(WORKLOADS[model], alone)

    def wire(side: Side, batch: Batch) -> dict[str, Any]:
        return {"wire": bytes_between(partial(side.step, batch))}

    return step_time.measure(model, names, rounds, 1, wire)


def of_hosts(mine: Any) -> list[list[Any]]:
    """Return the values of each host's ranks. Collective."""
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


def bytes_of_hosts(workload: Workload, name: str) -> dict[str, Any]:
    """Return the bytes of each host's ranks: "peak" and "held" with gradients after a few steps,
    both beyond the libraries' memory after a small model, and "predicted" by zshard. Collective.

    zshard predicts only its memory with gradients; activations are in the peak alone.
    """
    build_side(name, WORKLOADS[memory.TINY]).step(WORKLOADS[memory.TINY].batch(harness.generator()))
    before = memory.settled()
    side: Any = build_side(name, workload)
    generator, sampler = harness.generator(), memory.PssSampler()
    for _ in range(4):  # keep_gathered="auto" decides in the second; the third has what stays
        side.zero_grad()
        side.step(workload.batch(generator), zero_grad=False)
        sampler.sample()
    found = {"peak": sampler.stop() - before, "held": memory.settled() - before}
    if hasattr(side.module, "memory"):
        found["predicted"] = side.module.memory("predicted")["total"]
    return {key: [sum(host) for host in of_hosts(mine)] for key, mine in found.items()}


if __name__ == "__main__":
    harness.start(main)
