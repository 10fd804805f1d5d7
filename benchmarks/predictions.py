"""Predictions beside what was measured: memory on this machine, and runs that others published.

    python -m benchmarks.predictions [--cells gpt85m bert:c10d ...]
    python -m benchmarks.predictions --peaks FILE ...      # results of benchmarks.memory
    python -m benchmarks.predictions --runs RUNS.csv > docs/planner_accuracy.md

Without a file: memory("predicted") beside the growth of a rank's memory from before the model is
built until after some steps, with the gradients still allocated: zshard keeps its memory between
steps, all else is free by then. An earlier model has warmed up the libraries and the transport.
--peaks: the planner's peak beside a measured one, activations included.
--runs: rows of a CSV file with the columns of COLUMNS, which is not part of the repository. A row
without what the prediction needs is left out with that reason; its results are never used to guess.
Other software than torch's FSDP or DeepSpeed is listed apart.
"""

from __future__ import annotations

import collections
import csv
import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import harness
from benchmarks.memory import MALLOC, settled
from benchmarks.models import WORKLOADS
from benchmarks.sides import by_zshard
from zshard.extras.planner.decoder import Dims
from zshard.extras.planner.gpus import DEVICES, GIB, Network
from zshard.extras.planner.prediction import predict
from zshard.extras.planner.search import GAP
from zshard.extras.planner.ways import Cluster, Way
from zshard.extras.planner.workloads import Workload, decoder

CELLS = ["gpt10m", "gpt85m", "bert", "stack100", "gpt85m:c10d", "gpt85m:bf16", "gpt85m:in-backward"]
"""Models, full_shard over shm: by itself, over c10d, in bf16, with the optimizer in backward."""

TARGET = 0.03
"""Largest relative error."""


def main(argv: Sequence[str] | None = None) -> None:
    if harness.under_torchrun():
        harness.run_task(measure)
    full = {"ranks": 2, "cells": CELLS, "peaks": [], "runs": None}
    args = harness.options(__doc__.splitlines()[0], argv, full, {"cells": ["gpt10m"]})
    if args.runs:
        try:
            print("\n".join(page(*compare(read(Path(args.runs))))))
        except (OSError, ValueError) as error:
            raise SystemExit(f"predictions: {error}") from error
    elif args.peaks:
        print_peaks(args.peaks)
    else:
        results = []
        for cell in args.cells:
            ranks = harness.collect("benchmarks.predictions", args.ranks, {"cell": cell}, MALLOC)
            predicted = statistics.mean(each["predicted"]["total"] for each in ranks)
            measured = statistics.mean(each["measured"] for each in ranks)
            results.append({"cell": cell, **compared(predicted, measured), "per_rank": ranks})
        title = f"{args.ranks} ranks: parameters, gradients, state and buffers"
        harness.show(title, {each.pop("cell"): each for each in map(dict, results)})
        harness.finish(args, "predictions", results)


def compared(predicted: float, measured: float) -> dict[str, Any]:
    """Return a cell's numbers."""
    error = measured / predicted - 1
    sizes = {"predicted_bytes": predicted, "measured_bytes": measured}
    return {**sizes, "error": error, "verdict": harness.verdict(round(abs(error), 4), TARGET)}


# --- memory() beside this machine -----------------------------------------------------------------


def measure(cell: str) -> list[dict[str, Any]]:
    """Return {"predicted": bytes by part, "measured": bytes, "peak": memory("peak")} by rank."""
    name, _, variant = cell.partition(":")
    workload, transport = WORKLOADS[name], "c10d" if variant == "c10d" else "shm"
    warm_up(transport)
    before = settled()
    torch.manual_seed(0)
    model, optimizer = wrap(workload.build(), workload.units, transport, variant, workload.lr)
    predicted = model.memory("predicted")
    if transport == "shm":  # warm_up() has allocated its mailboxes
        predicted["total"] -= predicted.pop("transport")
    generator = harness.generator()
    for _ in range(4):
        optimizer.zero_grad()
        workload.loss(model, workload.batch(generator)).backward()
        optimizer.step()
    found = {"predicted": predicted, "measured": settled() - before, "peak": model.memory("peak")}
    dist.barrier()
    return harness.of_all_ranks(found)


def wrap(module: nn.Module, units: Any, transport: str, variant: str, lr: float) -> tuple[Any, Any]:
    import zshard

    precision = zshard.MixedPrecision(torch.bfloat16) if variant == "bf16" else None
    model = by_zshard(module, units, transport=transport, mixed_precision=precision)
    optimizer = zshard.AdamW(model.parameters(), lr=lr)
    if variant == "in-backward":
        model.optimizer_in_backward(optimizer)
    return model, optimizer


def warm_up(transport: str) -> None:
    """Train a model whose parameters are larger than the transport's buffers."""
    module = nn.Sequential(nn.Linear(2048, 2048), nn.GELU())
    model, optimizer = wrap(module, {nn.Linear}, transport, "", 0.1)
    for _ in range(2):
        model(torch.ones(4, 2048)).mean().backward()
        optimizer.step()


# --- the planner beside benchmarks.memory ---------------------------------------------------------

TRANSPORTS = {"zshard-full_shard": "shm", "zshard-full_shard-c10d": "c10d"}


def print_peaks(files: Iterable[str]) -> None:
    cells = {}
    for result in (
        each for file in files for each in json.loads(Path(file).read_text())["results"]
    ):
        for side in TRANSPORTS.keys() & result["sides"].keys():
            planned = planned_peak(result["model"], TRANSPORTS[side], result["ranks"])
            measured = result["sides"][side]["peak_bytes"]
            cells[f"{result['model']}, {TRANSPORTS[side]}"] = compared(planned, measured)
    harness.show("Peak of a rank, activations included, as planned", cells)


def planned_peak(name: str, transport: str, ranks: int) -> int:
    """Return the bytes of a rank that trains with full_shard and AdamW in float32."""
    workload = WORKLOADS[name]
    with torch.device("meta"):
        model = workload.build()
    shapes = [(each.shape, each.dtype) for each in workload.batch(torch.Generator())]

    def step(model: nn.Module, _: int) -> torch.Tensor:
        inputs, targets = (torch.zeros(shape, dtype=dtype) for shape, dtype in shapes)
        return workload.loss(model, (inputs, targets))

    # durations do not matter here, so the device does not either
    cluster = Cluster(DEVICES["h100"], ranks, Network(1, 1, ranks), transport)
    planned = predict(Workload(model, step, 1, "samples"), Way(precision="fp32"), cluster)
    return planned.memory["total"]


# --- the planner beside published runs ------------------------------------------------------------

Row = Mapping[str, str]

COLUMNS = (
    *("id", "software", "model", "params", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab"),
    *("tied", "seq", "micro_batch", "grad_accum", "global_batch_tokens", "precision", "act_ckpt"),
    *("compile", "offload", "strategy", "shard_group", "gpu", "gpu_mem_gb", "n_gpus", "per_node"),
    *("attention", "inter_gbps_per_node", "tokens_per_s_per_gpu", "step_s", "peak_mem_gb", "note"),
)
NUMBERS = ("layers", "hidden", "heads", "vocab", "seq", "micro_batch", "n_gpus")
NEEDED = (*NUMBERS, "strategy", "gpu")

FEW, WORST = 5, 10
"""Rows of a source whose median says something, and of the table of largest errors."""

HEAD = """# The planner's accuracy

This page compares the predictions of `zshard.plan()` with {rows} published training results from
{sources} sources. Results that do not state what a prediction needs are [excluded](#excluded-rows).

- **Constants.** Each device has one set of constants, which was fitted to the rows below. No source
  and no row has constants of its own.
- **Network.** If a row does not state the network, the device's usual network is assumed.
- **Units.** Tokens per second or seconds are compared, never TFLOP/s, which sources count
  differently.

`python -m benchmarks.predictions --runs RUNS.csv` writes this page. The file, which names the
source of each row, is not part of the repository. To compare your own runs, write a file with the
same columns.
"""


class Unpredictable(Exception):
    """A row lacks something, or has something that is not modelled."""


class Compared(NamedTuple):
    """One number of a row. apart: other software than torch's. what: "speed" or "memory"."""

    apart: str
    id: str
    source: str
    device: str
    what: str
    unit: str
    predicted: float
    published: float

    @property
    def error(self) -> float:
        """Relative: 0.1 if the prediction is 10 % higher than what was published."""
        return self.predicted / self.published - 1


def compare(rows: Iterable[Row]) -> tuple[list[Compared], list[tuple[str, str]]]:
    """Predict what the rows published; return the comparisons, and the rows left out."""
    found: list[Compared] = []
    left: list[tuple[str, str]] = []
    for row in rows:
        try:
            found += list(_compare(row))
        except (Unpredictable, ValueError) as reason:  # such as a group that does not divide GPUs
            left.append((row["id"], str(reason)))
    return found, left


def read(path: Path) -> Sequence[Row]:
    """Return the rows of a file; ValueError if it lacks columns."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    missing = [column for column in COLUMNS if column not in (rows or [{}])[0]]
    if missing:
        raise ValueError(f"{path} has no rows, or lacks columns: {missing}")
    return rows


def _compare(row: Row) -> Iterable[Compared]:
    name = device_of(row)
    dims, way = dims_of(row), way_of(row)
    ranks, device = _count(row, "n_gpus"), DEVICES[name]
    # hosts of 8 GPUs and the device's usual network, unless the row says else
    nic = _number(row, "inter_gbps_per_node") or device.nic
    network = Network(device.link, nic, min(_count(row, "per_node") or 8, ranks))
    cluster = Cluster(device, ranks, network, reduces_by_ring=True)
    planned = predict(decoder(dims), way, cluster)
    known = re.search("torch FSDP|torch DDP|DeepSpeed|YaFSDP", row["software"], re.IGNORECASE)
    head = ("" if known else row["software"], row["id"], row["id"].rsplit("-", 1)[0], name)
    published = ("tokens_per_s_per_gpu", "step_s", "peak_mem_gb")
    speed, step, memory = (_number(row, key) for key in published)
    if not (speed or step or memory):
        raise Unpredictable("no speed and no memory was published")
    if speed:
        yield Compared(*head, "speed", "tokens/s/GPU", planned.tokens_per_s, speed)
    elif step:
        yield Compared(*head, "speed", "s", planned.seconds, step)
    if memory:
        gap = GAP if "reserved" in row["note"] else 1.0
        yield Compared(*head, "memory", "GiB", gap * planned.memory["total"] / GIB, memory)


def _number(row: Row, key: str) -> float:
    try:
        return float(row[key] or 0)
    except ValueError:
        raise Unpredictable(f"{key} is not a number: {row[key]!r}") from None


def _count(row: Row, key: str) -> int:
    return int(_number(row, key))


def device_of(row: Row) -> str:
    name, memory = row["gpu"].lower(), _count(row, "gpu_mem_gb")
    if not name:
        raise Unpredictable("the GPU is not stated")
    if name == "a100" or name.startswith("v100"):
        name = f"{name[:4]}-{memory}gb"
    elif name.startswith("h100") and memory > 90:
        name = "h100-96gb"
    elif "ambiguous" in name:
        raise Unpredictable("the GPU is ambiguous")
    else:
        name = re.sub(r"\s+", "-", name.split("(")[0].strip())
    if name not in DEVICES:
        raise Unpredictable(f"no data sheet of {row['gpu']} {memory or ''}".strip())
    return name


def dims_of(row: Row) -> Dims:
    missing = [key for key in NEEDED if not row[key]]
    if missing:
        raise Unpredictable("not stated: " + ", ".join(missing))
    zero = [key for key in NUMBERS if _number(row, key) < 1]
    if zero:
        raise Unpredictable(f"{zero[0]} is {row[zero[0]]}")
    keys = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq")
    layers, width, heads, kv, ffn, vocab, seq = (_count(row, key) for key in keys)
    if not ffn or width % heads:
        raise Unpredictable("width is no multiple of heads" if ffn else "not stated: ffn")
    kv, tied = kv or heads, row["tied"] == "yes"
    return Dims(layers, width, heads, kv, ffn, vocab, seq, ffn < 4 * width or kv < heads, tied)


CHECKPOINTING = {
    **{"none": "", "full": "full", "block": "full", "selective (every 2nd layer)": "alternate"},
    **{"selective (per-op)": "selective", "selective (default)": "selective"},
}


def way_of(row: Row) -> Way:
    """Return what the run chose."""
    split = re.search(r"\b(TP|PP|CP|EP)\s?\d|async TP|\bTP\b|3D", row["strategy"] + row["software"])
    ckpt, precision = re.sub("^none.*", "none", row["act_ckpt"]), row["precision"].lower()
    if split:
        raise Unpredictable(f"splits the model: {row['strategy']}")
    if row["offload"] not in ("", "none"):
        raise Unpredictable(f"offload: {row['offload']}")
    if ckpt not in CHECKPOINTING:
        raise Unpredictable(f"activation checkpointing: {ckpt or 'not stated'}")
    if "lora" in row["model"].lower():
        raise Unpredictable("trains a part of the parameters (LoRA), which is not stated")
    strategy, group = strategy_of_row(row)
    return Way(
        strategy=strategy,
        group=group,
        precision="fp8" if re.search("fp8|float8", precision) else "bf16",
        checkpointing=CHECKPOINTING[ckpt],
        micro_batch=_count(row, "micro_batch"),
        accumulate=_count(row, "grad_accum") or 1,
        compiled=row["compile"] not in ("", "no"),
        attention="triton" if "triton" in row["attention"] else "flash",
    )


STRATEGIES = {
    **{"hsdp|hybrid": "hybrid_shard", "grad_op|zero-2": "shard_grad_op", "ddp|^none$": "no_shard"},
    **{"zero-1": "zero1", "full|fsdp|zero-3": "full_shard"},
}
"""What a row says -> strategy; the first one counts."""


def strategy_of_row(row: Row) -> tuple[str, int]:
    """Return the strategy and the size of a group, 0 if there is one group."""
    given, group = row["strategy"].lower(), _count(row, "shard_group")
    names = [name for pattern, name in STRATEGIES.items() if re.search(pattern, given)]
    if not names:
        raise Unpredictable(f"strategy {row['strategy']}")
    if names[0] == "hybrid_shard" or (
        names[0] == "full_shard" and 0 < group < _count(row, "n_gpus")
    ):
        return "hybrid_shard", group
    return names[0], 0


def medians(found: Iterable[Compared], key: str) -> dict[str, tuple[int, float]]:
    """Return by source or device: how many numbers, and their median absolute error."""
    groups = collections.defaultdict(list)
    for each in found:
        groups[getattr(each, key)].append(abs(each.error))
    return {name: (len(errors), statistics.median(errors)) for name, errors in groups.items()}


def page(found: Sequence[Compared], left: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of docs/planner_accuracy.md."""
    rows, sources = {each.id for each in found}, {each.source for each in found}
    yield HEAD.format(rows=len(rows), sources=len(sources))
    for what in ("speed", "memory"):
        for apart, title in ((False, "FSDP and DeepSpeed"), (True, "other software")):
            chosen = [each for each in found if (each.what, bool(each.apart)) == (what, apart)]
            if chosen:
                yield f"## {what.title()}, {title}\n"
                yield from _tables(chosen)
            if chosen and (what, apart) == ("speed", False):
                yield from _worst(chosen)
    yield "## Excluded rows\n\n| rows | reason |\n| --- | --- |"
    reasons = collections.Counter(reason for _, reason in left)
    yield from (f"| {count} | {reason} |" for reason, count in reasons.most_common())


def _tables(chosen: Sequence[Compared]) -> Iterator[str]:
    for key in ("source", "device"):
        groups = medians(chosen, key)
        errors = [error for n, error in groups.values() if n >= FEW]
        yield f"| {key} | rows | median absolute error |\n| --- | --- | --- |"
        for name, (n, error) in sorted(groups.items(), key=lambda item: -item[1][0]):
            yield f"| {name} | {n} | {error:.1%} |"
        if errors:
            words = f"median of {key}s with at least {FEW} rows"
            yield f"| **{words}** | | **{statistics.median(errors):.1%}** |"
        yield ""


def _worst(chosen: Sequence[Compared]) -> Iterator[str]:
    yield f"The {WORST} largest errors. The planner does not model PyTorch's allocator, which frees"
    yield "and reallocates memory in each step when a GPU is nearly full:\n"
    yield "| row | device | predicted | published | error |"
    yield "| --- | --- | --- | --- | --- |"
    for each in sorted(chosen, key=lambda each: -abs(each.error))[:WORST]:
        numbers = f"{each.predicted:,.4g} | {each.published:,.4g} {each.unit} | {each.error:+.0%}"
        yield f"| {each.id} | {each.device} | {numbers} |"
    yield ""


if __name__ == "__main__":
    harness.start(main)
