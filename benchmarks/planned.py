"""The planner's memory beside what benchmarks.memory measured: a step's peak, activations included.

python -m benchmarks.memory --models gpt10m --sides zshard-full_shard --out FILE
python -m benchmarks.planned FILE ...
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from benchmarks import harness
from benchmarks.harness import MIB
from benchmarks.models import WORKLOADS
from zshard.extras.planner.gpus import DEVICES, Network
from zshard.extras.planner.prediction import predict
from zshard.extras.planner.ways import Cluster, Way
from zshard.extras.planner.workloads import Workload

TRANSPORTS = {"zshard-full_shard": "shm", "zshard-full_shard-c10d": "c10d"}
TARGET = 0.03


def main(argv: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(description="Compare planned and measured peaks of memory.")
    made.add_argument("files", nargs="+", type=Path, help="results of benchmarks.memory")
    rows = []
    for file in made.parse_args(argv).files:
        for result in json.loads(file.read_text())["results"]:
            for side, found in result["sides"].items():
                if side in TRANSPORTS:
                    row = (result["model"], TRANSPORTS[side], result["ranks"], found["peak_bytes"])
                    rows.append(cells(*row))
    header = ["model", "transport", "planned", "measured", "error", "target"]
    harness.print_table("Peak of a rank, MiB, activations included", header, rows)


def cells(name: str, transport: str, ranks: int, measured: float) -> list[str]:
    planned = planned_bytes(name, transport, ranks)
    error = planned / measured - 1
    verdict = harness.verdict(round(abs(error), 4), TARGET)
    sizes = [f"{planned / MIB:.1f}", f"{measured / MIB:.1f}"]
    return [name, transport, *sizes, f"{100 * error:+.1f} %", verdict]


def planned_bytes(name: str, transport: str, ranks: int) -> int:
    """Return the peak of a rank that trains a workload with full_shard and AdamW in float32."""
    # durations do not matter here, so the device does not either
    cluster = Cluster(DEVICES["h100"], ranks, Network(1, 1, ranks), transport)
    return predict(planned_workload(name), Way(precision="fp32"), cluster).memory["total"]


def planned_workload(name: str) -> Workload:
    """Return one of WORKLOADS for the planner: a sample is a whole batch."""
    workload = WORKLOADS[name]
    with torch.device("meta"):
        model = workload.build()
    shapes = [(each.shape, each.dtype) for each in workload.batch(torch.Generator())]

    def step(model: nn.Module, _: int) -> torch.Tensor:
        inputs, targets = (torch.zeros(shape, dtype=dtype) for shape, dtype in shapes)
        return workload.loss(model, (inputs, targets))

    return Workload(model, step, 1, "samples")


if __name__ == "__main__":
    harness.start(main)
