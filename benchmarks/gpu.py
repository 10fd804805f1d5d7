"""One GPU: zshard compared with plain PyTorch, DDP and FSDP2 in time, memory and losses.

    python -m benchmarks.gpu [--parts steps host adam curve ranks] [--models gpt125m gpt1.5b]
    python tests/lib/stand_ins.py python -m benchmarks.gpu --quick     # a smoke test without a GPU

Each cell (a model with a batch and a mode, or another part) runs in a fresh torchrun, so compiler
caches and allocator state do not carry over. Results are written after each cell, so an interrupted
run keeps what it has measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_parts, gpu_report, gpu_sides, gpu_steps, harness
from benchmarks.gpu_sides import SIDES, SIZES

PARTS = ("steps", "host", "adam", "curve", "ranks")
MODES = ("eager", "compiled")
BATCHES = ("small", "large")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    purpose = "Compare zshard with plain PyTorch, DDP and FSDP2 on one GPU."
    parser = harness.parser(purpose, rounds="timed turns per side (default: 15; with --quick: 2)")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=SIZES,
        help="for the part steps (default: both GPTs; with --quick: tiny)",
    )
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all"
    )
    parser.add_argument(
        "--batches", nargs="+", choices=BATCHES, default=list(BATCHES), help="default: all"
    )
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=list(SIDES), help="default: all"
    )
    parser.add_argument(
        "--ranks",
        nargs="+",
        type=int,
        default=[2, 4],
        help="world sizes for the part ranks (default: 2 4)",
    )
    parser.add_argument("--cell", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.models = args.models or (["tiny"] if args.quick else ["gpt125m", "gpt1.5b"])
    args.rounds = args.rounds or (2 if args.quick else 15)
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
    for ranks, cell in cells(args):
        results.append(run_cell(ranks, cell))
        write(args, results)
    failed = [each["cell"] for each in results if "failed" in each]
    for cell in failed:
        print(f"failed: {cell}")
    return 1 if failed else 0


def cells(args: argparse.Namespace) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (ranks, cell) for everything requested, in the order of PARTS."""
    quick, turns = args.quick, {"rounds": args.rounds, "warmup": 1 if args.quick else 3}
    for part in (part for part in PARTS if part in args.parts):
        if part == "steps":
            yield from ((1, cell) for cell in step_cells(args, turns))
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
    """Yield the cells of the part steps; a turn of a small batch has more steps."""
    for model in args.models:
        for mode in args.modes:
            for batch in args.batches:
                steps = 2 if args.quick else 10 if batch == "small" else 3
                which = {"model": model, "batch": batch, "compiled": mode == "compiled"}
                yield {"part": "steps", **which, "sides": args.sides, "steps": steps, **turns}


def run_cell(ranks: int, cell: dict[str, Any]) -> dict[str, Any]:
    """Run one cell, print its tables and return its record, which has "failed" if it failed."""
    try:
        record: dict[str, Any] = harness.collect(
            "benchmarks.gpu", ranks, ["--cell", json.dumps(cell)]
        )
    except SystemExit as error:
        record = {"part": cell["part"], "failed": str(error), "cell": cell}
    for table in gpu_report.tables(record):
        table.show()
    return record


def measure_as_rank(args: argparse.Namespace) -> None:
    """Measure one cell in this rank."""
    cell = args.cell
    if not gpu_sides.is_stand_in():
        torch.cuda.set_device(0)  # several ranks share it
    ranks = harness.ranks_wanted()
    with harness.process_group(gpu_sides.backend(ranks)) as rank:
        measure = gpu_steps.measure if cell["part"] == "steps" else gpu_parts.PARTS[cell["part"]]
        record = measure(cell)
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
