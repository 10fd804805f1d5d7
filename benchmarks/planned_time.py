"""The planner's step time beside the clock, on this machine: one host over shm and c10d, two hosts.

    python -m benchmarks.planned_time [--models gpt85m ...] [--over shm c10d hosts] [--gbit 10]

Measuring for the plan and training take turns, so both see the same machine; each ratio is of one
turn. Two hosts (root only) are network namespaces of one rank and one core each. The optimizer is
zshard.AdamW, the strategy full_shard, all in float32.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

import zshard
from benchmarks import harness, hosts
from benchmarks.harness import Spread
from benchmarks.hosts_net import Hosts
from benchmarks.models import WORKLOADS
from benchmarks.planned import planned_workload
from zshard.planner.measured import Machine
from zshard.planner.prediction import Prediction, predict
from zshard.planner.ways import Cluster, Way

MODULE = "benchmarks.planned_time"
MODELS = ["gpt10m", "gpt85m", "bert", "stack100"]
OVER = ["shm", "c10d", "hosts"]
TARGET = 0.10
WARM_UP, STEPS = 3, 8


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    purpose = "Compare planned and measured step times on this machine."
    parser = harness.parser(purpose, rounds="turns of measuring and training (default: 3)")
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=MODELS, metavar="MODEL")
    parser.add_argument("--over", nargs="+", choices=OVER, default=OVER)
    parser.add_argument("--gbit", type=float, default=10.0, help="of the hosts' links (default 10)")
    args = parser.parse_args(argv)
    args.rounds = args.rounds or 3
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if harness.under_torchrun():
        if args.over == ["hosts"]:  # which share this machine's cores: each gets one of its own
            os.sched_setaffinity(0, {int(os.environ["RANK"])})
        harness.measure_as_rank(args, lambda: [measure(name, args) for name in args.models], show)
        return
    results: list[Any] = []
    for over in args.over:
        flags = ["--models", *args.models, "--over", over, f"--rounds={args.rounds}"]
        if over == "hosts":
            with Hosts(2, args.gbit) as two:
                results += hosts.collect(two, 1, MODULE, flags)
        else:
            results += harness.collect(MODULE, 2, flags)
    show(results)
    harness.finish(args, "planned-time", results)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return planned and measured seconds of each turn. Collective."""
    workload, (over,) = WORKLOADS[name], args.over
    torch.manual_seed(0)
    model = zshard.FSDP(workload.build(), transport=over)
    optimizer = zshard.AdamW(model.parameters(), lr=workload.lr)
    batch = workload.batch(harness.generator())

    def step() -> float:
        begun = time.perf_counter()
        workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        model.zero_grad()
        return time.perf_counter() - begun

    for _ in range(WARM_UP):
        step()
    planned, measured = [], []
    for _ in range(args.rounds):
        planned.append(planned_step(name, over).seconds)
        step()
        times = harness.of_all_ranks([step() for _ in range(STEPS)])
        measured.append(statistics.median(max(each) for each in zip(*times, strict=True)))
    return {"model": name, "over": over, "planned": planned, "measured": measured}


def planned_step(name: str, over: str) -> Prediction:
    """Return the prediction of a step, measured anew. Collective."""
    machine = Machine(torch.device("cpu"), over)
    return predict(planned_workload(name), Way(precision="fp32"), Cluster.of(machine))


def show(results: Sequence[dict[str, Any]]) -> None:
    rows = []
    for each in results:
        pairs = list(zip(each["planned"], each["measured"], strict=True))
        error = statistics.median(planned / measured for planned, measured in pairs) - 1
        times = [Spread.of([1e3 * s for s in each[k]]).text(0) for k in ("planned", "measured")]
        verdict = harness.verdict(round(abs(error), 3), TARGET)
        rows.append([each["model"], each["over"], *times, f"{100 * error:+.1f} %", verdict])
    header = ["model", "over", "planned ms min/med/max", "measured ms", "error", "target"]
    harness.print_table("Step of 2 ranks", header, rows)


if __name__ == "__main__":
    harness.start(main)
