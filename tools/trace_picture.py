"""Draw docs/images/trace.svg: one training step of each rank, from a trace of zshard.profile().

    export ZSHARD_TRACE=/tmp/t.json
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --size 5m --steps 20
    python tools/trace_picture.py /tmp/t.rank0.json /tmp/t.rank1.json [--step 15] [--out FILE]

A row for each depth of nesting; a colour for each column of the report.
"""

from __future__ import annotations

import argparse
import html
from pathlib import Path

from pictures import EMPTY, FAINT, INK, OUT, Svg

from zshard.extras import trace

COLOURS = {
    "forward": "#54aeff",
    "backward": "#8250df",
    "wait": "#cf222e",
    "gather": "#1a7f37",
    "pack": "#e16f24",
    "sum": "#bf8700",
    "step": "#6e7781",
    "calls": "#afb8c1",
}
LEFT, RIGHT, ROW, ROWS = 70, 745, 15, 4
LETTER = 4.9  # pixels of one


def step_of(ranks: list[trace.RankTrace], number: int) -> tuple[int, int]:
    """Return when the first rank began step `number`, and when the last one ended it."""
    ends = [
        [e for name, _, _, e in rank.ranges if name.endswith("optimizer.step")] for rank in ranks
    ]
    return min(each[number - 2] for each in ends), max(each[number - 1] for each in ends)


def draw_rank(svg: Svg, rank: trace.RankTrace, top: float, begin: int, end: int) -> None:
    """Draw the ranges of a rank between two times."""
    open_: list[int] = []
    scale = (RIGHT - LEFT) / (end - begin)
    shown = (each for each in rank.ranges if each[3] > begin and each[2] < end)
    for name, _, begun, ended in sorted(shown, key=lambda each: (each[2], -each[3])):
        while open_ and open_[-1] <= begun:
            open_.pop()
        column, unit, _ = trace.parts_of(name)
        first, last = max(begun, begin), min(ended, end)
        x, width = LEFT + scale * (first - begin), scale * (last - first)
        y = top + ROW * len(open_)
        svg.box(round(x, 1), y, round(max(width - 0.5, 0.4), 1), ROW - 2, COLOURS[column])
        text = name.removeprefix("zshard::")
        short = " ".join(text.split()[:4]) if column == "wait" else unit or text
        text = next((each for each in (text, short) if len(each) * LETTER < width), "")
        if text:
            svg.text(round(x + 2, 1), y + 10, html.escape(text), 8, "#fff", "start")
        open_.append(ended)
    svg.text(14, top + 10, f"rank {rank.rank}", 12, INK, "start")


def draw(ranks: list[trace.RankTrace], number: int) -> Svg:
    begin, end = step_of(ranks, number)
    svg = Svg(60 + (ROW * ROWS + 14) * len(ranks), "A training step of each rank, on one clock")
    svg.text(380, 22, f"One step of {len(ranks)} ranks: {(end - begin) / 1e9:.2f} s", 14)
    top = 38.0
    for rank in ranks:
        svg.box(LEFT, top, RIGHT - LEFT, ROW * ROWS, EMPTY)
        draw_rank(svg, rank, top, begin, end)
        top += ROW * ROWS + 14
    for i, (column, colour) in enumerate(COLOURS.items()):
        svg.box(LEFT + 84 * i, top - 2, 10, 10, colour)
        svg.text(LEFT + 84 * i + 14, top + 7, column, 10, FAINT, "start")
    return svg


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", help="traces of each rank, or a merged one")
    parser.add_argument("--step", type=int, default=15, help="the step to draw (default: 15)")
    parser.add_argument("--out", type=Path, default=OUT / "trace.svg", help="the file to write")
    args = parser.parse_args()
    draw(trace.read(args.files).ranks, args.step).write(args.out)


if __name__ == "__main__":
    main()
