"""GPUs: zshard compared with plain PyTorch, DDP and FSDP2 in time, memory and losses.

    python -m benchmarks.gpu [--parts steps host adam curve ranks] [--models gpt125m gpt1.5b]
    python -m benchmarks.gpu --gpus 8 --parts bandwidth killed steps --sides ddp fsdp2 zshard
    python tests/lib/stand_ins.py python -m benchmarks.gpu --quick     # a smoke test without a GPU

Each cell (a model with a batch and a mode, or another part) runs in a fresh torchrun, so compiler
caches and allocator state do not carry over. Results are written after each cell, so an interrupted
run keeps what it has measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_parts, gpu_report, gpu_saves, gpu_several, gpu_sides, gpu_steps, harness
from benchmarks.gpu_sides import MODES, SIDES, SIZES, USUAL

MEASURES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "memory": gpu_steps.measure,
    "bandwidth": gpu_several.bandwidth,
    "killed": gpu_several.killed,
    "steps": gpu_steps.measure,
    "saves": gpu_saves.measure,
    **gpu_parts.PARTS,
}
PARTS = tuple(MEASURES)
USUAL_PARTS = ("steps", *gpu_parts.PARTS)
BATCHES = ("small", "large")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    purpose = "Compare zshard with plain PyTorch, DDP and FSDP2 on one GPU."
    parser = harness.parser(purpose, rounds="timed turns per side (default: 15; with --quick: 2)")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(USUAL_PARTS),
        help=f"default: {' '.join(USUAL_PARTS)}",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=SIZES,
        help="for memory, steps and saves (default: both GPTs; with --quick: tiny)",
    )
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=list(MODES[:2]), help="default: eager compiled"
    )
    parser.add_argument(
        "--batches", nargs="+", choices=BATCHES, default=list(BATCHES), help="default: all"
    )
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=list(USUAL), help=f"default: {' '.join(USUAL)}"
    )
    parser.add_argument(
        "--ranks",
        nargs="+",
        type=int,
        default=[2, 4],
        help="world sizes for the part ranks (default: 2 4)",
    )
    gpus = "ranks with a GPU each on this host, for all parts but ranks (default: 1)"
    parser.add_argument("--gpus", type=int, default=1, help=gpus)
    hosts = "hosts on which this command is run, the same on all (default: 1)"
    parser.add_argument("--hosts", type=int, default=1, help=hosts)
    head = "with several: the name of one of them, and the first of its free ports: NAME:29500"
    parser.add_argument("--head", help=head)
    parser.add_argument("--cell", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.models = args.models or (["tiny"] if args.quick else ["gpt125m", "gpt1.5b"])
    args.rounds = args.rounds or (2 if args.quick else 15)
    if args.hosts > 1 and not (args.head and args.head.rpartition(":")[2].isdecimal()):
        parser.error("--hosts needs --head NAME:PORT")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if harness.under_torchrun():
        measure_as_rank(args)
        return 0
    missing = gpu_sides.what_is_missing()
    if missing:
        raise SystemExit(f"benchmarks.gpu needs a GPU that zshard supports:\n{missing}")
    if gpu_sides.is_stand_in() and not args.quick:
        raise SystemExit(
            "this is a fake GPU (tests/lib/stand_ins.py), whose times are meaningless: add --quick"
        )
    results = [gpu_sides.describe()]
    for number, (ranks, cell) in enumerate(cells(args)):
        record = run_cell(ranks, cell, rendezvous(args, number))
        if record is not None:
            results.append(record)
            write(args, results)
    failed = [each["cell"] for each in results if "failed" in each]
    for cell in failed:
        print(f"failed: {cell}")
    return 1 if failed else 0


def cells(args: argparse.Namespace) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (ranks, cell) for everything requested, in the order of PARTS."""
    quick, turns = args.quick, {"rounds": args.rounds, "warmup": 1 if args.quick else 3}
    for part in (part for part in PARTS if part in args.parts):
        if part in ("memory", "steps"):
            yield from ((args.gpus, {"part": part, **cell}) for cell in step_cells(args, turns))
        elif part == "saves":
            for model in args.models:
                yield args.gpus, {"part": part, "model": model, "steps": 3}
        elif part == "bandwidth":
            for mib in (1,) if quick else (1, 16, 64, 256):
                yield args.gpus, {"part": part, "mib": mib, "steps": 3 if quick else 20, **turns}
        elif part == "killed":
            yield args.gpus, {"part": part, "timeout": 30 if quick else 60}
        elif part == "host":
            sides = [side for side in args.sides if side in ("ddp", "fsdp2", "zshard")]
            yield 1, {"part": part, "sides": sides, "steps": 10, **turns}
        elif part == "adam":
            elements = 1 << (16 if quick else 28)
            for tensors in (1, 256):
                size = {"elements": elements, "tensors": tensors}
                yield 1, {"part": part, **size, "steps": 10, **turns}
        elif part == "curve":
            size = {"layers": 2, "width": 64, "seq": 32, "rows": 4, "steps": 20}
            full = {"layers": 12, "width": 768, "seq": 256, "rows": 32, "steps": 200}
            yield 1, {"part": part, **(size if quick else full)}
        else:
            size = {"layers": 2, "width": 64, "seq": 16, "rows": 2, "steps": 3}
            full = {"layers": 6, "width": 384, "seq": 128, "rows": 8, "steps": 10}
            for ranks in args.ranks[:1] if quick else args.ranks:
                yield ranks, {"part": part, **(size if quick else full)}


def step_cells(args: argparse.Namespace, turns: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the cells of memory and steps; a turn of a small batch has more steps."""
    for model in args.models:
        for mode in args.modes:
            for batch in args.batches:
                steps = 2 if args.quick else 10 if batch == "small" else 3
                which = {"model": model, "batch": batch, "mode": mode}
                yield {**which, "sides": args.sides, "steps": steps, **turns}


def rendezvous(args: argparse.Namespace, number: int) -> list[str]:
    """Return torchrun's flags for the hosts. Each cell has a port of its own: a host that is ahead
    would otherwise find the last cell's."""
    if args.hosts == 1:
        return ["--standalone"]
    name, _, port = args.head.rpartition(":")
    where = f"{name}:{int(port) + number}"
    return [
        f"--nnodes={args.hosts}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={where}",
        f"--rdzv-id={where}",
    ]


def run_cell(ranks: int, cell: dict[str, Any], hosts: list[str]) -> dict[str, Any] | None:
    """Run one cell, print its tables and return its record, which has "failed" if it failed; None
    where rank 0 is on another host."""
    try:
        record: dict[str, Any] | None = harness.collect(
            "benchmarks.gpu", ranks, ["--cell", json.dumps(cell)], hosts=hosts
        )
    except SystemExit as error:
        record = {"part": cell["part"], "failed": str(error), "cell": cell}
    for table in gpu_report.tables(record) if record else ():
        table.show()
    return record


def measure_as_rank(args: argparse.Namespace) -> None:
    """Measure one cell in this rank."""
    cell = args.cell
    if not gpu_sides.is_stand_in():
        torch.cuda.set_device(gpu_sides.device())
    if "killed" in cell:
        gpu_several.die(cell)
        return
    with harness.process_group(gpu_sides.backend()) as rank:
        record = MEASURES[cell["part"]](cell)
    if rank == 0 and args.out:
        harness.write_json(args.out, record)


def write(args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """Write the results so far as JSON and Markdown; a quick run without --out writes nothing."""
    if args.quick and args.out is None:
        return
    path: Path = args.out or harness.RESULTS / f"{datetime.date.today()}-gpu.json"
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "cell")}
    where = harness.machine()
    record = {"benchmark": "gpu", "machine": where, "settings": settings, "results": results}
    harness.write_json(path, record)
    path.with_suffix(".md").write_text(gpu_report.markdown(results, where))


if __name__ == "__main__":
    harness.start(main)
