"""Draw README's picture of step time and memory of the libraries on one model, from results files.

    python docs/tools/library_picture.py [--out docs/images/memory-and-speed.svg]

The numbers come from the newest step-time and memory files in benchmarks/results that have all of
SIDES. The same files give the same picture, byte for byte (with the same matplotlib).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
OUT = ROOT / "docs" / "images" / "memory-and-speed.svg"
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
INK, FAINT, EDGE, PAPER = "#1f2328", "#59636e", "#afb8c1", "#ffffff"
PEER_BARS, OUR_BARS = (EDGE, "#dbe0e5"), ("#54aeff", "#b6e3ff")
DARK = {
    INK: "#f0f6fc",
    FAINT: "#9198a1",
    EDGE: "#656c76",
    "#0969da": "#4493f8",
    PAPER: "#0d1117",
    "#1a7f37": "#3fb950",
    PEER_BARS[1]: "#3d444d",
    OUR_BARS[0]: "#1f6feb",
    OUR_BARS[1]: "#0c4a9e",
}
"""Colour -> the colour in its place on a dark page."""

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


def newest(benchmark: str) -> dict[str, Any]:
    """Return the newest record of a benchmark that has all sides."""
    files = sorted(RESULTS.glob(f"*-{benchmark}*.json"))
    records = [json.loads(path.read_text()) for path in files]
    complete = [each for each in records if SIDES.keys() <= result_of(each).get("sides", {}).keys()]
    if not complete:
        raise SystemExit(f"no {benchmark} results of {MODEL} with all of {', '.join(SIDES)}")
    return max(complete, key=lambda record: str(record["machine"]["date"]))


def result_of(record: Mapping[str, Any]) -> dict[str, Any]:
    return next((each for each in record["results"] if each.get("model") == MODEL), {})


def caption(steps: Mapping[str, Any], memory: Mapping[str, Any]) -> str:
    """Return the lines below the bars: how, where and when the numbers were measured."""
    here = steps["machine"]
    rounds = len(next(iter(result_of(steps)["sides"].values()))["samples_ms"])
    dates = sorted({str(each["machine"]["date"])[:10] for each in (steps, memory)})
    versions = f"torch {here['torch']}"
    if "deepspeed" in here:
        versions += f", DeepSpeed {here['deepspeed']}"
    machine = f"{here['cpu']}, {here['cores']} cores, {here['memory_bytes'] / 2**30:.0f} GiB"
    return (
        f"Step time: median of {rounds} rounds, lines from min to max; DDP = 1 in each round. "
        "Memory: PSS, libraries subtracted.\n"
        f"{machine}, {versions}, {' and '.join(dates)}."
    )


def draw(steps: Mapping[str, Any], memory: Mapping[str, Any], out: Path) -> None:
    """Draw both panels."""
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        figure = Figure(figsize=(8.6, 3.8))  # inches: about the width of a page on GitHub
        left, right = figure.subplots(1, 2, sharey=True)
        draw_steps(left, result_of(steps)["sides"])
        draw_memory(right, result_of(memory)["sides"])
        left.set_yticks(range(len(SIDES)), list(SIDES.values()))
        left.get_yticklabels()[list(SIDES).index(OURS)].set_fontweight("bold")
        left.invert_yaxis()
        title = f"{TITLE}, {result_of(steps)['ranks']} CPU ranks of one host"
        figure.suptitle(title, fontsize=11, fontweight="bold")
        figure.text(0.012, 0.022, caption(steps, memory), fontsize=7.5, color=FAINT)
        figure.subplots_adjust(left=0.175, right=0.985, top=0.84, bottom=0.19, wspace=0.06)
        figure.savefig(out, metadata={"Date": None, "Creator": None})
    rules = [
        f'[style*="{what}: {light}"] {{{what}: {dark} !important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    ]
    style = "\n@media (prefers-color-scheme: dark) {\n" + "\n".join(rules) + "\n}</style>"
    out.write_text(out.read_text().replace("</style>", style, 1))


def draw_steps(axes: Any, sides: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw each side's step time, and a line over the range of its rounds."""
    for row, name in enumerate(SIDES):
        ratio = sides[name]["ratio"]
        bar(axes, name, (row, 0.62), ratio["median"], f"{ratio['median']:.2f}")
        if ratio["max"] > ratio["min"]:
            axes.plot([ratio["min"], ratio["max"]], [row, row], color=INK, linewidth=0.9)
    axes.axvline(1.0, color=FAINT, linewidth=0.8, linestyle=(0, (3, 3)), zorder=0)
    panel(axes, "Step time, ratio to DDP (lower is better)")


def draw_memory(axes: Any, sides: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw each side's memory at the peak and between steps; the first side says which is which."""
    words = [" at the peak", " between steps"]
    for row, name in enumerate(SIDES):
        peak, rest = sides[name]["peak_bytes"] / 2**20, sides[name]["held_bytes"] / 2**20
        bar(axes, name, (row - 0.18, 0.36), peak, f"{peak:.0f}{words[0]}")
        bar(axes, name, (row + 0.18, 0.36), rest, f"{rest:.0f}{words[1]}", pale=True)
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
    axes.spines["left"].set_color(EDGE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT, help="the SVG file to write")
    draw(newest("step-time"), newest("memory"), parser.parse_args().out)
