"""The results of benchmarks/gpu.py as tables, printed or as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import harness, host_time
from benchmarks.gpu_sides import BASE, BY_HAND, DDP, PEER
from benchmarks.harness import MIB, Spread


@dataclass(frozen=True)
class Table:
    title: str
    header: list[str]
    rows: list[list[str]]

    def show(self) -> None:
        """Print the table."""
        harness.print_table(self.title, self.header, self.rows)

    def markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"**{self.title}**\n\n{text}\n"


def tables(record: Mapping[str, Any]) -> list[Table]:
    """Return the tables for one part's record."""
    if "failed" in record:
        return [
            Table(
                f"{record['part']}: FAILED", ["cell"], [[str(record["cell"])], [record["failed"]]]
            )
        ]
    made: list[Table] = _OF_PART[record["part"]](record)
    return made


def markdown(records: Sequence[Mapping[str, Any]], where: Mapping[str, Any]) -> str:
    """Return a full run as Markdown; `where` is the result of harness.machine()."""
    head = f"# GPU, {where['date']}, commit {where['commit']}, torch {where['torch']}\n"
    return "\n".join([head, *(table.markdown() for each in records for table in tables(each))])


# --------------------------------------------------------------------------------------


def _text(spread: Mapping[str, float] | None, digits: int) -> str:
    return Spread(**spread).text(digits) if spread else ""


def _mib(count: int | None) -> str:
    return "" if count is None else f"{count / MIB:.0f}"


def _device(record: Mapping[str, Any]) -> list[Table]:
    names = [name for name in record if name != "part"]
    title = "Device"
    if record["stand_in"]:
        title += " (FAKE GPU ON THE HOST: these times and sizes say nothing about a real GPU)"
    return [Table(title, names, [[str(record[name]) for name in names]])]


def _steps(record: Mapping[str, Any]) -> list[Table]:
    what = f"{record['model']}, {record['parameters'] / 1e6:.0f} M, {record['batch']} batch"
    what += f", {record['mode']}, {record['ranks']} rank(s)"
    memory = _step_memory(record, what)
    return [memory] if record["part"] == "memory" else [_step_times(record, what), memory]


OTHERS = (BASE, BY_HAND, DDP, PEER)


def _step_times(record: Mapping[str, Any], what: str) -> Table:
    rows = []
    for name, side in record["sides"].items():
        goal, verdict = side["goal"], ""
        if goal is not None:
            ratio = side["ratio"].get(goal["against"])
            verdict = harness.verdict(ratio and ratio["median"], goal["limit"])
            verdict = f"x {goal['against']} {verdict}" if verdict else ""
        apart = side["loss_difference"]
        rows.append(
            [
                name,
                *(_text(side[kind], 2) for kind in ("ms", "wall_ms", "host_ms")),
                *(_text(side["ratio"].get(other), 3) for other in OTHERS),
                verdict,
                *(f"{apart[other]:.1e}" if other in apart else "" for other in OTHERS[:3]),
                str(side["contended"]),
            ]
        )
    header = ["side", "ms (GPU)", "ms (clock)", "ms (host)"]
    header += [f"x {other}" for other in OTHERS]
    header += ["goal", *(f"loss diff to {other}" for other in OTHERS[:3]), "contended"]
    return Table(f"Step: {what} (min/median/max)", header, rows)


def _step_memory(record: Mapping[str, Any], what: str) -> Table:
    rows = []
    for name, side in record["sides"].items():
        memory = side["memory"]
        own = [memory[which] and memory[which]["total"] for which in ("taken", "predicted")]
        same = "" if own[0] is None else "equal" if own[0] == own[1] else "DIFFERS"
        later = memory["counts_by_step"][1:]
        quiet = "" if not later else "yes" if len(set(map(str, later))) == 1 else "no"
        held = [_mib(memory[f"{what}_bytes"]) for what in ("held", "peak", "reserved")]
        constant = "yes" if memory["constant"] else "NO"
        rows.append([name, *held, constant, quiet, *map(_mib, own), same])
    header = [
        "side",
        "held",
        "peak",
        "peak reserved",
        "held is constant",
        "no cudaMalloc after step 2",
    ]
    header += ["taken", "predicted", "prediction"]
    return Table(f"Memory in MiB, one side at a time: {what}", header, rows)


def _host(record: Mapping[str, Any]) -> list[Table]:
    rows = [
        [name, *(_text(side["added_us"][part], 1) for part in host_time.PARTS)]
        for name, side in record["sides"].items()
    ]
    plain = _text(record["plain_us"]["total"], 1)
    title = (
        f"Host: us added per unit, {record['units']} units (min/median/max; plain unit: {plain})"
    )
    return [Table(title, ["side", *host_time.PARTS], rows)]


def _adam(record: Mapping[str, Any]) -> list[Table]:
    rows = []
    for name, side in record["sides"].items():
        share, goal = side["share_of_copy"], side["goal"]
        met = "" if goal is None else f">= {goal:g}: "
        met += "" if goal is None else "met" if share["median"] >= goal else "MISSED"
        rows.append([name, _text(side["ms"], 3), _text(side["gb_per_s"], 0), _text(share, 3), met])
    title = f"AdamW: {record['elements']:,} elements in {record['tensors']} tensors"
    return [Table(title, ["side", "ms", "GB/s", "fraction of a copy's rate", "goal"], rows)]


def _curve(record: Mapping[str, Any]) -> list[Table]:
    losses = record["losses"]
    count = len(next(iter(losses.values())))
    shown = sorted({round(i * (count - 1) / 9) for i in range(10)})
    rows = [[name, *(f"{values[i]:.3f}" for i in shown)] for name, values in losses.items()]
    title = f"Loss, mean of ten steps ({record['steps']} steps, width {record['width']})"
    limits = record["tolerance"]
    apart = [
        [name, f"{value:.1e}", harness.verdict(value, limits[name])]
        for name, value in record["largest_difference"].items()
    ]
    return [
        Table(title, ["side", *(f"to step {10 * i + 10}" for i in shown)], rows),
        Table("Loss of zshard against", ["side", "max relative difference", "tolerance"], apart),
    ]


def _ranks(record: Mapping[str, Any]) -> list[Table]:
    rows = [
        [name, f"{side['largest_difference_to_ddp']:.1e}", str(side["same_bits_as_first"])]
        for name, side in record["sides"].items()
    ]
    title = f"{record['ranks']} ranks, {record['steps']} steps, float32"
    return [
        Table(
            title, ["transport", "max loss diff to DDP (gloo)", "bit-identical to the first"], rows
        )
    ]


def _bandwidth(record: Mapping[str, Any]) -> list[Table]:
    rows = [
        [name, _text(side["ms"], 3), _text(side["gb_per_s"], 1)]
        for name, side in record["sides"].items()
    ]
    title = f"{record['mib']} MiB unsharded, {record['ranks']} ranks (min/median/max)"
    return [Table(title, ["what", "ms", "GB/s that a rank receives"], rows)]


def _killed(record: Mapping[str, Any]) -> list[Table]:
    rows = [[str(r), *map(str, end)] for r, end in enumerate(record["ends"])]
    title = f"Rank {record['killed']} of {record['ranks']}, killed in training, is reported by all"
    return [Table(title, ["rank", "error", "words", "seconds"], rows)]


def _saves(record: Mapping[str, Any]) -> list[Table]:
    names = list(next(iter(record["sides"].values())))
    rows = [[name, *(f"{side[n]:.2f}" for n in names)] for name, side in record["sides"].items()]
    size = f"{record['state_bytes'] / 1e9:.2f} GB of state"
    return [Table(f"Checkpoints of {record['model']}: {size}", ["side", *names], rows)]


_OF_PART = {
    "device": _device,
    "memory": _steps,
    "bandwidth": _bandwidth,
    "killed": _killed,
    "saves": _saves,
    "steps": _steps,
    "host": _host,
    "adam": _adam,
    "curve": _curve,
    "ranks": _ranks,
}
