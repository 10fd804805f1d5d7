"""Predictions beside published runs: rows of a CSV file, with the columns of `COLUMNS`.

    python -m benchmarks.plan_against RUNS.csv > docs/planner_accuracy.md
    python -m benchmarks.plan_against RUNS.csv --json

The file of runs is not part of the repository. A row is predicted if it says what the prediction
needs. Nothing is guessed from its results: a row without a sequence length, or with ranks that
split a model by tensors or layers, is left out with that reason. Runs by other software than
torch's FSDP or DeepSpeed are predicted and listed apart.
"""

from __future__ import annotations

import argparse
import collections
import csv
import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zshard.extras.planner.decoder import Dims
from zshard.extras.planner.gpus import DEVICES, GIB, Device, Network
from zshard.extras.planner.prediction import predict
from zshard.extras.planner.search import GAP
from zshard.extras.planner.ways import Cluster, Way
from zshard.extras.planner.workloads import decoder

Row = Mapping[str, str]

COLUMNS = (
    *("id", "software", "model", "params", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab"),
    *("tied", "seq", "micro_batch", "grad_accum", "global_batch_tokens", "precision", "act_ckpt"),
    *("compile", "offload", "strategy", "shard_group", "gpu", "gpu_mem_gb", "n_gpus", "per_node"),
    *("attention", "inter_gbps_per_node", "tokens_per_s_per_gpu", "step_s", "peak_mem_gb", "note"),
)
NUMBERS = ("layers", "hidden", "heads", "vocab", "seq", "micro_batch", "n_gpus")
NEEDED = (*NUMBERS, "strategy", "gpu")

FEW = 5
"""Rows of a source whose median says something."""

WORST = 10

FULL = (
    "its GPUs' memory is nearly full, where torch's allocator frees and allocates anew in each step"
)
ODD = "the source contradicts itself: its neighbours are faster"
REASONS = {
    "mosaic-140": "64 GPUs, 2 sequences each: the wire is exposed, and memory is nearly full",
    "mosaic-080": ODD,
    "mosaic-021": ODD,
    "mosaic-179": ODD,
    "tinyllama-001": "its own fused kernels for the norm, the MLP and the loss",
    "yafsdp-013": "the network is not stated; 400 Gbit/s are assumed",
    **dict.fromkeys(("mosaic-143", "mosaic-144", "mosaic-149", "mosaic-150", "mosaic-151"), FULL),
    **dict.fromkeys(("mosaic-020", "mosaic-022", "mosaic-071"), FULL),
    **dict.fromkeys(("mosaic-030", "mosaic-031", "mosaic-032", "mosaic-033"), FULL),
}
"""Likely reasons for large errors, of rows by id."""

HEAD = """# The planner beside published runs

`python -m benchmarks.plan_against RUNS.csv` predicts runs that others published, and compares. This
page is its result for {rows} rows of {sources} sources that state what a prediction needs. Each
device has one set of constants, fitted to its rows; no source and no row has constants of its own.
Where a row does not state the network, the device's usual one is assumed. Tokens per second or
seconds are compared, never TFLOP/s, which sources count in different ways. The file says where its
rows come from; write one with the same columns to compare runs of your own.
"""


class Unpredictable(Exception):
    """A row lacks something, or has something that is not modelled. Its text is the reason."""


class Compared(NamedTuple):
    """One number of a row. what: "speed" or "memory". unit: of both numbers."""

    id: str
    source: str
    device: str
    what: str
    unit: str
    predicted: float
    published: float
    apart: str

    @property
    def error(self) -> float:
        """Relative: 0.1 if the prediction is 10 % higher than what was published."""
        return self.predicted / self.published - 1


class LeftOut(NamedTuple):
    id: str
    reason: str


def compare(rows: Iterable[Row]) -> tuple[list[Compared], list[LeftOut]]:
    """Predict what the rows published; return the comparisons, and the rows left out."""
    found: list[Compared] = []
    left: list[LeftOut] = []
    for row in rows:
        try:
            found += list(_compare(row))
        except (Unpredictable, ValueError) as reason:  # such as a group that does not divide GPUs
            left.append(LeftOut(row["id"], str(reason)))
    return found, left


def read(path: Path) -> Sequence[Row]:
    """Return the rows of a file. Raises ValueError if it lacks columns."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    missing = [column for column in COLUMNS if rows and column not in rows[0]]
    if missing or not rows:
        raise ValueError(f"{path}: no rows" if not rows else f"{path} lacks columns: {missing}")
    return rows


def _compare(row: Row) -> Iterable[Compared]:
    name, device = device_of(row)
    dims, way = dims_of(row), way_of(row)
    cluster = cluster_of(row, device)
    prediction = predict(decoder(dims), way, cluster)
    head = (row["id"], row["id"].rsplit("-", 1)[0], name)
    apart = apart_of(row)
    speed, step, memory = (
        _number(row, key) for key in ("tokens_per_s_per_gpu", "step_s", "peak_mem_gb")
    )
    if not (speed or step or memory):
        raise Unpredictable("no speed and no memory was published")
    if speed:
        yield Compared(*head, "speed", "tokens/s/GPU", prediction.tokens_per_s, speed, apart)
    elif step:
        yield Compared(*head, "speed", "s", prediction.seconds, step, apart)
    if memory:
        gap = GAP if "reserved" in row["note"] else 1.0
        predicted = gap * prediction.memory["total"] / GIB
        yield Compared(*head, "memory", "GiB", predicted, memory, apart)


# --- what a row says ------------------------------------------------------------------------------


def _number(row: Row, key: str) -> float:
    try:
        return float(row[key] or 0)
    except ValueError:
        raise Unpredictable(f"{key} is not a number: {row[key]!r}") from None


def device_of(row: Row) -> tuple[str, Device]:
    """Return the name and the device."""
    given = row["gpu"].lower()
    memory = int(_number(row, "gpu_mem_gb"))
    if not given:
        raise Unpredictable("the GPU is not stated")
    if given == "a100" or given.startswith("v100"):
        name = f"{given[:4]}-{memory}gb"
    elif given.startswith("h100") and memory > 90:
        name = "h100-96gb"
    elif "ambiguous" in given:
        raise Unpredictable("the GPU is ambiguous")
    else:
        name = re.sub(r"\s+", "-", given.split("(")[0].strip())
    if name not in DEVICES:
        raise Unpredictable(f"no data sheet of {row['gpu']} {memory or ''}".strip())
    return name, DEVICES[name]


def dims_of(row: Row) -> Dims:
    """Return the dimensions."""
    missing = [key for key in NEEDED if not row[key]]
    if missing:
        raise Unpredictable("not stated: " + ", ".join(missing))
    zero = [key for key in NUMBERS if _number(row, key) < 1]
    if zero:
        raise Unpredictable(f"{zero[0]} is {row[zero[0]]}")
    layers, width, heads = (int(_number(row, key)) for key in ("layers", "hidden", "heads"))
    kv = int(_number(row, "kv_heads")) or heads
    vocab, seq, ffn = (int(_number(row, key)) for key in ("vocab", "seq", "ffn"))
    if not ffn:
        raise Unpredictable("not stated: ffn")
    if width % heads:
        raise Unpredictable("width is no multiple of heads")
    tied = row["tied"] == "yes"
    return Dims(layers, width, heads, kv, ffn, vocab, seq, ffn < 4 * width or kv < heads, tied)


_CHECKPOINTING = {
    "none": "",
    "full": "full",
    "block": "full",
    "selective (every 2nd layer)": "alternate",
    "selective (per-op)": "selective",
    "selective (default)": "selective",
}


def way_of(row: Row) -> Way:
    """Return what the run chose."""
    split = re.search(r"\b(TP|PP|CP|EP)\s?\d|async TP|\bTP\b|3D", row["strategy"] + row["software"])
    if split:
        raise Unpredictable(f"splits the model: {row['strategy']}")
    if row["offload"] not in ("", "none"):
        raise Unpredictable(f"offload: {row['offload']}")
    ckpt = row["act_ckpt"]
    if ckpt.startswith("none"):
        ckpt = "none"
    if ckpt not in _CHECKPOINTING:
        raise Unpredictable(f"activation checkpointing: {ckpt or 'not stated'}")
    precision = row["precision"].lower()
    kind = "fp8" if "fp8" in precision or "float8" in precision else "bf16"
    if "lora" in row["model"].lower():
        raise Unpredictable("trains a part of the parameters (LoRA), which is not stated")
    strategy, group = strategy_of_row(row)
    return Way(
        strategy=strategy,
        group=group,
        precision=kind,
        checkpointing=_CHECKPOINTING[ckpt],
        micro_batch=int(_number(row, "micro_batch")),
        accumulate=int(_number(row, "grad_accum")) or 1,
        compiled=row["compile"] not in ("", "no"),
        attention="triton" if "triton" in row["attention"] else "flash",
    )


def strategy_of_row(row: Row) -> tuple[str, int]:
    given, ranks = row["strategy"].lower(), int(_number(row, "n_gpus"))
    group = int(_number(row, "shard_group"))
    if "hsdp" in given or "hybrid" in given:
        return "hybrid_shard", group
    if "grad_op" in given or "zero-2" in given:
        return "shard_grad_op", 0
    if "ddp" in given or given == "none":
        return "no_shard", 0
    if "zero-1" in given:
        return "zero1", 0
    if "full" in given or "fsdp" in given or "zero-3" in given:
        return ("hybrid_shard", group) if 0 < group < ranks else ("full_shard", 0)
    raise Unpredictable(f"strategy {row['strategy']}")


def cluster_of(row: Row, device: Device) -> Cluster:
    """Return the hardware; where the row says nothing of hosts, they have 8 GPUs and the device's
    usual network."""
    ranks = int(_number(row, "n_gpus"))
    per_host = int(_number(row, "per_node")) or 8
    nic = _number(row, "inter_gbps_per_node") or device.nic
    network = Network(device.link, nic, min(per_host, ranks))
    return Cluster(device, ranks, network, reduces_by_ring=True)


_TORCH = re.compile(r"torch FSDP|torch DDP|DeepSpeed|YaFSDP", re.IGNORECASE)


def apart_of(row: Row) -> str:
    """Return the software if it is none that the prediction is meant for, else ""."""
    return "" if _TORCH.search(row["software"]) else row["software"]


# --- summaries ------------------------------------------------------------------------------------


def medians(found: Iterable[Compared], key: str) -> dict[str, tuple[int, float]]:
    """Return by source or device: how many numbers, and their median absolute error."""
    groups: dict[str, list[float]] = {}
    for each in found:
        groups.setdefault(getattr(each, key), []).append(abs(each.error))
    return {name: (len(errors), statistics.median(errors)) for name, errors in groups.items()}


def as_json(found: Iterable[Compared], left: Iterable[LeftOut]) -> list[dict[str, Any]]:
    """Return what --json prints: an object for each number, then one for each row left out."""
    numbers = [{**each._asdict(), "error": each.error} for each in found]
    return [*numbers, *(each._asdict() for each in left)]


def page(found: Sequence[Compared], left: Sequence[LeftOut]) -> Iterator[str]:
    """Yield the lines of docs/planner_accuracy.md."""
    rows, sources = {each.id for each in found}, {each.source for each in found}
    yield HEAD.format(rows=len(rows), sources=len(sources))
    for what in ("speed", "memory"):
        for apart in (False, True):
            chosen = [each for each in found if (each.what, bool(each.apart)) == (what, apart)]
            if chosen:
                yield from _section(what, apart, chosen)
    yield "## Rows left out\n"
    yield "| rows | why |\n| --- | --- |"
    reasons = collections.Counter(each.reason for each in left)
    yield from (f"| {count} | {reason} |" for reason, count in reasons.most_common())


def _section(what: str, apart: bool, chosen: Sequence[Compared]) -> Iterator[str]:
    title = "Speed" if what == "speed" else "Memory"
    yield f"## {title}, {'other software' if apart else 'FSDP and DeepSpeed'}\n"
    for key in ("source", "device"):
        groups = medians(chosen, key)
        errors = [error for n, error in groups.values() if n >= FEW]
        yield f"| {key} | rows | median of absolute errors |\n| --- | --- | --- |"
        for name, (n, error) in sorted(groups.items(), key=lambda item: -item[1][0]):
            yield f"| {name} | {n} | {error:.1%} |"
        if errors:
            words = f"median of those with {FEW} rows or more"
            yield f"| **{words}** | | **{statistics.median(errors):.1%}** |"
        yield ""
    if what == "speed" and not apart:
        yield from _worst(chosen)


def _worst(chosen: Sequence[Compared]) -> Iterator[str]:
    yield f"The {WORST} largest errors:\n"
    yield "| row | device | predicted | published | error | likely reason |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for each in sorted(chosen, key=lambda each: -abs(each.error))[:WORST]:
        numbers = f"{each.predicted:,.4g} | {each.published:,.4g} {each.unit} | {each.error:+.0%}"
        yield f"| {each.id} | {each.device} | {numbers} | {REASONS.get(each.id, 'not known')} |"
    yield ""


def main(argv: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(description="Compare the planner with published runs.")
    made.add_argument("runs", type=Path, metavar="CSV", help="with the columns of COLUMNS")
    made.add_argument("--json", action="store_true", help="print each number, not the page")
    args = made.parse_args(argv)
    try:
        found, left = compare(read(args.runs))
    except (OSError, ValueError) as error:
        raise SystemExit(f"plan_against: {error}") from error
    print(json.dumps(as_json(found, left), indent=1) if args.json else "\n".join(page(found, left)))


if __name__ == "__main__":
    main()
