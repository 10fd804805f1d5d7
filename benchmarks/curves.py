"""Draw the picture of docs/optimizers.md: losses over steps with moments in 8 bits and in 32.

    python -m benchmarks.curves [--results FILE] [--out docs/images/eight-bit.svg]

The numbers come from the newest file in benchmarks/results that has curves of all of LINES
(benchmarks.optim --cases curves), unless a file is named. The same file gives the same picture,
byte for byte (with the same matplotlib).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import harness, picture
from benchmarks.optim import BASE, COPY
from benchmarks.picture import FAINT, GREEN, INK, OUR_COLOUR, PEER_COLOUR, STYLE

OUT = harness.ROOT / "docs" / "images" / "eight-bit.svg"
SIZE = (8.6, 3.6)


class Line(NamedTuple):
    label: str
    colour: str
    dashes: str


OURS = "AdamW8bit, float32"
LINES = {
    BASE: Line("AdamW", INK, "-"),
    OURS: Line("AdamW8bit", OUR_COLOUR, "--"),
    COPY: Line("bfloat16: AdamW, float32 copy", INK, "-"),
    "AdamW8bit, bfloat16, master": Line('bfloat16: AdamW8bit(master="int8")', GREEN, "-"),
    "AdamW, bfloat16 stochastic": Line("bfloat16: AdamW, stochastic rounding", FAINT, "-."),
    "AdamW, bfloat16 to nearest": Line("bfloat16: AdamW, rounded to nearest", FAINT, ":"),
}
"""Side of the case curves of benchmarks.optim -> how it is drawn."""

Curves = Mapping[str, Sequence[Sequence[tuple[int, float]]]]
"""Side -> for each seed: steps and losses."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(description="Draw losses over steps from a results file.")
    newest = "(default: the newest in benchmarks/results with all lines)"
    made.add_argument("--results", type=Path, metavar="FILE", help=f"eight-bit results {newest}")
    picture.add_out(made, OUT)
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    record = pick(args.results)
    draw(record, args.out)
    print(f"wrote {args.out} ({args.out.stat().st_size / 1e3:.0f} kB)")


def pick(path: Path | None, folder: Path = harness.RESULTS) -> dict[str, Any]:
    """Return the record in `path`, or the newest in `folder` that has all lines.

    Raises SystemExit if there is none or `path` lacks a line.
    """
    if path is not None:
        return picture.complete(path, missing_lines, "curves of")
    found = picture.newest(folder, missing_lines)
    if found is None:
        raise SystemExit(f"no curves in {folder}: run\npython -m benchmarks.optim --cases curves")
    return found


def missing_lines(record: Mapping[str, Any]) -> str:
    """Return the names of the lines that `record` lacks; "" if it has all of them."""
    curves = curves_of(record)
    return ", ".join(name for name in LINES if not curves.get(name))


def curves_of(record: Mapping[str, Any]) -> Curves:
    """Return the curves of a results file, {} if it has none."""
    if record.get("benchmark") not in ("optim", "eight-bit"):
        return {}
    return next((each["curves"] for each in record["results"] if "curves" in each), {})


# --- the picture ----------------------------------------------------------------------------------


def draw(record: Mapping[str, Any], out: Path) -> None:
    """Draw two panels: the losses, and how far each differs from float32's with the same seed."""
    import matplotlib  # not needed by what imports this module

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves = curves_of(record)
    with pyplot.rc_context(STYLE):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=SIZE)
        losses(left, curves)
        differences(right, curves)
        figure.suptitle("Held-out loss, nats per byte", fontsize=11, fontweight="bold", color=INK)
        figure.text(0.012, 0.02, caption(record), fontsize=7.5, color=FAINT)
        figure.subplots_adjust(left=0.065, right=0.985, top=0.84, bottom=0.23, wspace=0.16)
        picture.save(figure, out)


def losses(axes: Any, curves: Curves) -> None:
    """Draw float32's seeds as a band, and the means of it and of AdamW8bit."""
    steps, low, _, high = spread(curves[BASE])
    axes.fill_between(steps, low, high, color=PEER_COLOUR, alpha=0.5, linewidth=0)
    for name in (BASE, OURS):
        steps, _, mean, _ = spread(curves[name])
        draw_line(axes, LINES[name], steps, mean)
    finish(axes, "float32: mean of the seeds, and AdamW's range")


def differences(axes: Any, curves: Curves) -> None:
    """Draw each side's loss minus that of BASE, with equal seeds; means over seeds."""
    for name, line in LINES.items():
        if name == BASE:
            continue
        pairs = zip(curves[name], curves[BASE], strict=False)  # a side may have fewer seeds
        apart = [[(s, a - b) for (s, a), (_, b) in zip(*pair, strict=True)] for pair in pairs]
        steps, _, mean, _ = spread(apart)
        draw_line(axes, line, steps, mean)
    axes.axhline(0, color=PEER_COLOUR, linewidth=0.8, zorder=0)
    axes.margins(y=0.2)  # for the legend
    finish(axes, "minus that of AdamW in float32 with the same seed")


def spread(curves: Sequence[Sequence[tuple[int, float]]]) -> tuple[list[Any], ...]:
    """Return steps, and over the seeds the minimum, mean and maximum of each."""
    rows = [[loss for _, loss in curve] for curve in curves]
    columns = list(zip(*rows, strict=True))
    means = [sum(column) / len(column) for column in columns]
    return [s for s, _ in curves[0]], list(map(min, columns)), means, list(map(max, columns))


def draw_line(axes: Any, line: Line, steps: Sequence[int], values: Sequence[float]) -> None:
    style = {"color": line.colour, "linestyle": line.dashes, "linewidth": 1.6}
    axes.plot(steps, values, label=line.label, **style)


def finish(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=9.5, color=INK, loc="left")
    axes.set_xlabel("step", color=INK, labelpad=1)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK)
    axes.tick_params(colors=INK, length=2)
    for edge in ("top", "right"):
        axes.spines[edge].set_visible(False)
    for edge in ("left", "bottom"):
        axes.spines[edge].set_color(PEER_COLOUR)


def caption(record: Mapping[str, Any]) -> str:
    """Return the lines below the panels: what was trained, where and when."""
    here, curves = record["machine"], curves_of(record)
    seeds, fewest = len(curves[BASE]), min(len(curves[name]) for name in LINES)
    fewer = f" (some in bfloat16: {fewest})" if fewest < seeds else ""
    return (
        "GPT of 0.9 M parameters on the sources of Python's standard library, "
        f"{seeds} seeds{fewer}.\n"
        f"{here['cpu']}, {here['cores']} cores, torch {here['torch']}, {str(here['date'])[:10]}."
    )


if __name__ == "__main__":
    harness.start(main)
