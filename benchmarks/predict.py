"""Predicted and measured memory per rank: does memory("predicted") match what training uses?

    python -m benchmarks.predict [--cells gpt85m bert:c10d ...]

zshard keeps its memory between steps; everything else that a step allocates (activations, torch's
temporaries) is free after it. So the prediction should equal the growth of a rank's memory from
before the model is built until after some steps, with the gradients still allocated: by then every
slot and bucket has been touched. Growth is the ranks' mean PSS (see benchmarks/memory.py), which
counts a shared page once. An earlier model has warmed up the libraries, the transport and malloc.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import harness
from benchmarks.harness import MIB
from benchmarks.memory import MALLOC, pss, trim
from benchmarks.models import WORKLOADS

VARIANTS = ("shm", "c10d", "bf16", "in-backward")
"""full_shard over shm or c10d; over shm with bf16, and with the optimizer in backward."""

CELLS = ("gpt10m", "gpt85m", "bert", "stack100", "gpt85m:c10d", "gpt85m:bf16", "gpt85m:in-backward")
QUICK_CELLS = ("gpt10m",)
TARGET = 0.03
STEPS = 4


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    purpose = "Compare predicted and measured memory per rank, one cell per process group."
    parser = harness.parser(purpose, ranks=2)
    which = f"variants: {', '.join(VARIANTS)} (default: {' '.join(CELLS)})"
    parser.add_argument("--cells", nargs="+", metavar="MODEL[:VARIANT]", help=which)
    args = parser.parse_args(argv)
    args.cells = args.cells or list(QUICK_CELLS if args.quick else CELLS)
    known = ", ".join(WORKLOADS)
    for cell in args.cells:
        model, _, variant = cell.partition(":")
        if model not in WORKLOADS or variant not in ("", *VARIANTS):
            parser.error(
                f"unknown cell {cell!r}: models are {known}, variants {', '.join(VARIANTS)}"
            )
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if harness.under_torchrun():
        measure_as_rank(args)
        return
    results = []
    for cell in args.cells:
        told = harness.collect("benchmarks.predict", args.ranks, ["--cells", cell], MALLOC)
        results.append(compare(cell, told))
    show(results, args.ranks)
    harness.finish(args, "predict", results)


# --------------------------------------------------------------------------------------
# A rank's part


def measure_as_rank(args: argparse.Namespace) -> None:
    """Measure the first requested cell in this rank."""
    with harness.process_group() as rank:
        ranks = harness.of_all_ranks(measure(args.cells[0]))
    if rank == 0 and args.out:
        harness.write_json(args.out, ranks)


def measure(cell: str) -> dict[str, Any]:
    """Return {"predicted": bytes by part, "measured": bytes, "peak": memory("peak")} here."""
    name, _, variant = cell.partition(":")
    workload, transport = WORKLOADS[name], "c10d" if variant == "c10d" else "shm"
    warm_up(transport)
    before = settled()
    torch.manual_seed(0)
    model = wrap(workload.build(), set(workload.units), transport, variant)
    optimizer = adamw(model, workload.lr, variant)
    predicted = model.memory("predicted")
    if transport == "shm":  # warm_up() has allocated its mailboxes
        predicted["total"] -= predicted.pop("transport")
    generator = harness.generator()
    for _ in range(STEPS):
        optimizer.zero_grad()
        workload.loss(model, workload.batch(generator)).backward()
        optimizer.step()
    measured = settled() - before
    peak = model.memory("peak")
    dist.barrier()
    return {"predicted": predicted, "measured": measured, "peak": peak}


def wrap(module: nn.Module, units: set[type[nn.Module]], transport: str, variant: str) -> Any:
    import zshard

    precision = zshard.MixedPrecision(torch.bfloat16) if variant == "bf16" else None
    return zshard.FSDP(
        module, transport=transport, auto_wrap_policy=units, mixed_precision=precision
    )


def adamw(model: Any, lr: float, variant: str) -> Any:
    import zshard

    optimizer = zshard.AdamW(model.parameters(), lr=lr)
    if variant == "in-backward":
        model.optimizer_in_backward(optimizer)
    return optimizer


def warm_up(transport: str) -> None:
    """Train a model whose parameters are larger than the transport's buffers."""
    model = wrap(nn.Sequential(nn.Linear(2048, 2048), nn.GELU()), {nn.Linear}, transport, "")
    optimizer = adamw(model, 0.1, "")
    for _ in range(2):
        model(torch.ones(4, 2048)).mean().backward()
        optimizer.step()


def settled() -> int:
    """Return this rank's PSS while all ranks are idle, once it has stopped changing on all of them:
    what a deleted model had is released a moment later. Collective."""
    gc.collect()
    trim()
    found, moved = 0, torch.ones(1)
    while moved:
        time.sleep(0.2)
        dist.barrier()
        last, found = found, pss()
        moved = torch.tensor([float(abs(found - last) > MIB)])
        dist.all_reduce(moved)
    return found


# --------------------------------------------------------------------------------------
# The comparison


def compare(cell: str, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one cell's JSON record: means over the ranks in bytes."""
    predicted = sum(each["predicted"]["total"] for each in ranks) / len(ranks)
    measured = sum(each["measured"] for each in ranks) / len(ranks)
    return {
        "cell": cell,
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "error": measured / predicted - 1,
        "per_rank": list(ranks),
    }


def show(results: Sequence[dict[str, Any]], ranks: int) -> None:
    """Print the table in MiB."""
    rows = [
        [
            each["cell"],
            f"{each['predicted_bytes'] / MIB:.1f}",
            f"{each['measured_bytes'] / MIB:.1f}",
            f"{100 * each['error']:+.1f} %",
            harness.verdict(round(abs(each["error"]), 4), TARGET),
        ]
        for each in results
    ]
    harness.print_table(
        f"MiB per rank, {ranks} ranks: parameters, gradients, optimizer state and buffers",
        ["cell", "predicted", "measured", "error", "target"],
        rows,
    )


if __name__ == "__main__":
    harness.start(main)
