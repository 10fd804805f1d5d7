"""GPUs: zshard compared with plain PyTorch, DDP and FSDP2 in time, memory and losses.

    python -m benchmarks.gpu [--parts steps saves host] [--models gpt125m gpt1.5b]
    python -m benchmarks.gpu --gpus 8 --parts bandwidth killed steps --sides ddp fsdp2 zshard
    python tests/lib/stand_ins.py python -m benchmarks.gpu --quick     # a smoke test without a GPU

Each cell (a model with a batch and a mode, or another part) runs in a fresh torchrun, so compiler
caches and allocator state do not carry over. Results are written after each cell, so an interrupted
run keeps its measurements.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks import gpu_parts, gpu_sides, gpu_steps, harness

PARTS = {
    "memory": gpu_steps.measure,
    "bandwidth": gpu_parts.bandwidth,
    "killed": gpu_parts.killed,
    "steps": gpu_steps.measure,
    "saves": gpu_parts.saves,
    "host": gpu_parts.host,
}

FULL = {
    "parts": ["steps", "host"],
    "models": ["gpt125m", "gpt1.5b"],
    "modes": list(gpu_sides.MODES),
    "batches": ["small", "large"],
    "sides": list(gpu_sides.USUAL),
    "rounds": 15,
    "gpus": 1,
    "hosts": 1,
    "head": "",
}
"""--gpus: of this host, for all parts but saves and host, with a rank each."""
QUICK = {"models": ["tiny"], "rounds": 2}
CHOICES = {"parts": PARTS, "models": gpu_sides.SIZES, "modes": gpu_sides.MODES}
CHOICES |= {"batches": ["small", "large"], "sides": gpu_sides.SIDES}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """With several hosts, on which this command is run, --head names one and the first of its free
    ports: NAME:29500."""
    purpose = "Compare zshard with plain PyTorch, DDP and FSDP2 on GPUs."
    args = harness.options(purpose, argv, FULL, QUICK, CHOICES)
    if args.hosts > 1 and not args.head.rpartition(":")[2].isdecimal():
        raise SystemExit("--hosts needs --head NAME:PORT")
    return args


def measure(part: str, **cell: Any) -> dict[str, Any]:
    """Measure one cell in this rank."""
    return PARTS[part]({"part": part, **cell})


def main(argv: Sequence[str] | None = None) -> int:
    if harness.under_torchrun():
        fake = gpu_sides.is_stand_in()
        if not fake:
            torch.cuda.set_device(gpu_sides.device())
        harness.run_task(measure, backend="gloo" if fake else "cpu:gloo,cuda:nccl")
    args = arguments(argv)
    if missing := gpu_sides.what_is_missing():
        raise SystemExit(f"benchmarks.gpu needs a GPU that zshard supports:\n{missing}")
    if gpu_sides.is_stand_in() and not args.quick:
        raise SystemExit("times of a fake GPU (tests/lib/stand_ins.py) mean nothing: add --quick")
    results = [gpu_sides.describe()]
    for number, cell in enumerate(cells(args)):
        record = run_cell(cell, rendezvous(args, number))
        if record is not None:
            results.append(record)
            harness.show(record["title"], record["sides"])
            harness.finish(args, "gpu", results)
    return int(any("failed" in record for record in results))


def cells(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a cell for everything requested, in the order of PARTS."""
    quick, turns = args.quick, {"rounds": args.rounds, "warmup": 1 if args.quick else 3}
    few = {"ranks": args.gpus, "steps": 2 if quick else 3, **turns}
    sizes = (1,) if quick else (1, 16, 64, 256)
    sides = [side for side in args.sides if side in ("ddp", "fsdp2", "zshard")]
    steps = [
        {"model": model, "mode": mode, "batch": batch, "sides": args.sides, **few}
        | ({"steps": 10} if batch == "small" and not quick else {})
        for model in args.models
        for mode in args.modes
        for batch in args.batches
    ]
    found: dict[str, list[dict[str, Any]]] = {
        "memory": steps,
        "steps": steps,
        "saves": [{"model": model, **few, "ranks": 1} for model in args.models],
        "bandwidth": [{"mib": mib, **few, "steps": 3 if quick else 20} for mib in sizes],
        "killed": [{"ranks": args.gpus, "timeout": 30 if quick else 60}],
        "host": [{"sides": sides, **few, "ranks": 1, "steps": 10}],
    }
    for part in (part for part in PARTS if part in args.parts):
        yield from ({"part": part, **cell} for cell in found[part])


def rendezvous(args: argparse.Namespace, number: int) -> list[str]:
    """Return torchrun's flags for the hosts. Each cell has its own port: a host that is ahead
    would otherwise find the last cell's."""
    if args.hosts == 1:
        return ["--standalone"]
    name, _, port = args.head.rpartition(":")
    where = f"{name}:{int(port) + number}"
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={where}", f"--rdzv-id={where}"]
    return [f"--nnodes={args.hosts}", *meeting]


def run_cell(cell: dict[str, Any], hosts: list[str]) -> dict[str, Any] | None:
    """Run one cell and return its record, which has "failed" if it failed; None where rank 0 is on
    another host."""
    try:
        record = harness.collect("benchmarks.gpu", cell["ranks"], cell, hosts=hosts)
        return None if record is None else {"part": cell["part"], "cell": cell, **record}
    except SystemExit as error:
        title = f"{cell['part']}: FAILED"
        found = {"part": cell["part"], "cell": cell, "failed": str(error), "title": title}
        return {**found, "sides": {str(cell): {"failed": str(error)}}}


if __name__ == "__main__":
    harness.start(main)
