"""Draw README's picture of step time and memory from results files.

    python -m benchmarks.picture [--step-time FILE] [--memory FILE] [--out docs/images/x.svg]

The picture compares the libraries on gpt85m. The numbers come from the newest step-time and memory
files in benchmarks/results that contain all of SIDES, unless files are named. The same files give
the same picture, byte for byte (with the same matplotlib).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import MIB

MODEL = "gpt85m"
TITLE = "GPT, 85 M parameters, fp32, AdamW"
SIDES = {
    "ddp": "DDP",
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    "deepspeed-3": "DeepSpeed ZeRO-3",
    "zshard-full_shard": "zshard full_shard",
}
"""Name in the results -> label, from top to bottom."""

OURS = "zshard-full_shard"
OUT = harness.ROOT / "docs" / "images" / "memory-and-speed.svg"

INK, FAINT, PEER_COLOUR, OUR_COLOUR = "#1f2328", "#59636e", "#afb8c1", "#0969da"
PAPER, GREEN = "#ffffff", "#1a7f37"
PEER_BARS, OUR_BARS = (PEER_COLOUR, "#dbe0e5"), ("#54aeff", "#b6e3ff")
DARK = {
    INK: "#f0f6fc",
    FAINT: "#9198a1",
    PEER_COLOUR: "#656c76",
    OUR_COLOUR: "#4493f8",
    PAPER: "#0d1117",
    GREEN: "#3fb950",
    PEER_BARS[1]: "#3d444d",
    OUR_BARS[0]: "#1f6feb",
    OUR_BARS[1]: "#0c4a9e",
}
"""Colour -> the colour in its place on a dark page."""

SIZE = (8.6, 3.8)
"""Inches: about the width of a page on GitHub."""

STYLE: dict[str, Any] = {
    "svg.hashsalt": "zshard",  # or element ids are random
    "svg.fonttype": "none",  # text as text: a tenth of the size of outlines
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],  # of nearly the same width
    "font.size": 9.5,
    "figure.facecolor": PAPER,
    **{f"{name}.color": INK for name in ("text", "xtick", "ytick")},
    "axes.labelcolor": INK,
}


Missing = Callable[[Mapping[str, Any]], str]
"""What a record lacks; "" if nothing."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(
        description=f"Draw step time and peak memory of {MODEL} from results files."
    )
    which = "(default: the newest in benchmarks/results with all sides)"
    made.add_argument("--step-time", type=Path, metavar="FILE", help=f"step-time results {which}")
    made.add_argument("--memory", type=Path, metavar="FILE", help=f"memory results {which}")
    add_out(made, OUT)
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    steps = pick("step-time", args.step_time)
    memory = pick("memory", args.memory)
    draw(steps, memory, args.out)
    print(f"wrote {args.out} ({args.out.stat().st_size / 1e3:.0f} kB)")


# --------------------------------------------------------------------------------------
# The results


def pick(benchmark: str, path: Path | None, folder: Path = harness.RESULTS) -> dict[str, Any]:
    """Return the record in `path`, or the newest one of `benchmark` in `folder` with all sides.

    Raises SystemExit if there is none or `path` lacks a side.
    """
    results = f"{benchmark} results of {MODEL}"
    if path is not None:
        return complete(path, lambda record: missing_sides(record, benchmark), f"{results} for")
    found = newest(folder, lambda record: missing_sides(record, benchmark))
    if found is None:
        module = benchmark.replace("-", "_")
        raise SystemExit(
            f"no {results} with {', '.join(SIDES)} in {folder}: run\n"
            f"python -m benchmarks.{module} --models {MODEL} --sides {' '.join(SIDES)}"
        )
    return found


def complete(path: Path, missing: Missing, what: str) -> dict[str, Any]:
    """Return the record in `path`. Raises SystemExit if something is missing."""
    record = read(path)
    if missing(record):
        raise SystemExit(f"{path} has no {what} {missing(record)}")
    return record


def newest(folder: Path, missing: Missing) -> dict[str, Any] | None:
    """Return the newest record in `folder` that lacks nothing; None if there is none."""
    records = [read(each) for each in sorted(folder.glob("*.json"))]
    found = [record for record in records if not missing(record)]
    return max(found, key=lambda record: str(record["machine"]["date"]), default=None)


def add_out(made: argparse.ArgumentParser, default: Path) -> None:
    """Add --out, the image to write."""
    where = default.relative_to(harness.ROOT)
    what = f"the image to write, .svg or .png (default: {where})"
    made.add_argument("--out", type=Path, default=default, metavar="FILE", help=what)


def read(path: Path) -> dict[str, Any]:
    """Return the record in `path`. Raises SystemExit if it cannot be read or is not JSON."""
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"cannot read {path}: {error}") from error
    return record


def missing_sides(record: Mapping[str, Any], benchmark: str) -> str:
    """Return the names of the sides that `record` lacks; "" if it has all of them."""
    names = {} if record.get("benchmark") != benchmark else sides_of(record)
    return ", ".join(name for name in SIDES if name not in names)


def sides_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sides of MODEL in `record`, by name; empty if it was not measured."""
    return result_of(record).get("sides", {})


def result_of(record: Mapping[str, Any]) -> dict[str, Any]:
    return next((each for each in record["results"] if each.get("model") == MODEL), {})


def caption(steps: Mapping[str, Any], memory: Mapping[str, Any]) -> str:
    """Return the lines below the bars: how, where and when the numbers were measured."""
    here, there = steps["machine"], memory["machine"]
    rounds = len(next(iter(sides_of(steps).values()))["samples_ms"])
    dates = sorted({str(each["date"])[:10] for each in (here, there)})
    versions = [f"torch {here['torch']}"]
    if "deepspeed" in here:
        versions.append(f"DeepSpeed {here['deepspeed']}")
    machine = f"{here['cpu']}, {here['cores']} cores, {here['memory_bytes'] / 2**30:.0f} GiB"
    return (
        f"Step time: median of {rounds} rounds, lines from min to max; DDP = 1 in each round. "
        "Memory: PSS, libraries subtracted.\n"
        f"{machine}, {', '.join(versions)}, {' and '.join(dates)}."
    )


# --------------------------------------------------------------------------------------
# The picture


def draw(steps: Mapping[str, Any], memory: Mapping[str, Any], out: Path) -> None:
    """Draw both panels and write them to `out`, creating its directory."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(
            "benchmarks.picture requires matplotlib: run python -m pip install matplotlib"
        ) from error
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        figure = Figure(figsize=SIZE)
        left, right = figure.subplots(1, 2, sharey=True)
        draw_steps(left, {name: sides_of(steps)[name]["ratio"] for name in SIDES})
        draw_memory(right, {name: sides_of(memory)[name] for name in SIDES})
        left.set_yticks(range(len(SIDES)), list(SIDES.values()))
        left.get_yticklabels()[list(SIDES).index(OURS)].set_fontweight("bold")
        left.invert_yaxis()
        title = f"{TITLE}, {result_of(steps)['ranks']} CPU ranks of one host"
        figure.suptitle(title, fontsize=11, fontweight="bold")
        figure.text(0.012, 0.022, caption(steps, memory), fontsize=7.5, color=FAINT)
        figure.subplots_adjust(left=0.175, right=0.985, top=0.84, bottom=0.19, wspace=0.06)
        save(figure, out)


def draw_steps(axes: Any, ratios: Mapping[str, Mapping[str, float]]) -> None:
    """Draw each side's step time, and a line over the range of its rounds."""
    for row, (name, ratio) in enumerate(ratios.items()):
        bar(axes, name, (row, 0.62), ratio["median"], f"{ratio['median']:.2f}")
        if ratio["max"] > ratio["min"]:
            axes.plot([ratio["min"], ratio["max"]], [row, row], color=INK, linewidth=0.9)
    axes.axvline(1.0, color=FAINT, linewidth=0.8, linestyle=(0, (3, 3)), zorder=0)
    panel(axes, "Step time, ratio to DDP (lower is better)")


def draw_memory(axes: Any, sides: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw each side's memory at the peak and between steps; the first side says which is which."""
    words = [" at the peak", " between steps"]
    for row, (name, side) in enumerate(sides.items()):
        peak, held = side["peak_bytes"] / MIB, side["held_bytes"] / MIB
        bar(axes, name, (row - 0.18, 0.36), peak, f"{peak:.0f}{words[0]}")
        bar(axes, name, (row + 0.18, 0.36), held, f"{held:.0f}{words[1]}", pale=True)
        words = ["", ""]
    panel(axes, "Memory per rank, MiB (lower is better)")


def bar(
    axes: Any, name: str, at: tuple[float, float], value: float, text: str, pale: bool = False
) -> None:
    """Draw a side's bar at (row, height), in its colour or a paler one, with its number inside."""
    row, height = at
    axes.barh(row, value, height=height, color=(OUR_BARS if name == OURS else PEER_BARS)[pale])
    weight = "bold" if name == OURS else "normal"
    beside = {"xytext": (5, 0), "textcoords": "offset points"}  # of the bar's beginning
    axes.annotate(text, (0, row), va="center", color=INK, fontweight=weight, **beside)


def panel(axes: Any, title: str) -> None:
    """Finish a panel: its title, the values of its axis, no frame."""
    axes.set_title(title, fontsize=10)
    axes.set_xlim(left=0)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", length=2, labelsize=8.5, colors=FAINT)
    for edge in ("top", "right", "bottom"):
        axes.spines[edge].set_visible(False)
    axes.spines["left"].set_color(PEER_COLOUR)


def save(figure: Any, out: Path) -> None:
    """Write a figure in the colours of DARK's keys, creating its directory.

    An SVG takes DARK's values where the page is dark.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    stamps = {"Date": None, "Creator": None} if out.suffix == ".svg" else {"Software": None}
    figure.savefig(out, dpi=150, metadata=stamps)
    if out.suffix == ".svg":
        rules = [
            f'[style*="{what}: {light}"] {{{what}: {dark} !important}}'
            for light, dark in DARK.items()
            for what in ("fill", "stroke")
        ]
        style = "\n@media (prefers-color-scheme: dark) {\n" + "\n".join(rules) + "\n}</style>"
        out.write_text(out.read_text().replace("</style>", style, 1))


if __name__ == "__main__":
    harness.start(main)
