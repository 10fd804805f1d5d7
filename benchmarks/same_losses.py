"""Draw README's picture of losses: an example under DDP and under full_shard, to the end.

    python -m benchmarks.same_losses [--example image_gpt] [--out docs/images/losses.svg]
    python -m benchmarks.same_losses --results FILE    # draw those of an earlier run again

Both run on two ranks, unless runs/losses has their numbers (from an earlier call). The losses go to
benchmarks/results, and a line below the picture says in how many of the steps they differ.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import examples, harness, picture
from benchmarks.curves import finish
from benchmarks.picture import INK, OUR_COLOUR, STYLE

OUT = harness.ROOT / "docs" / "images" / "losses.svg"
SIZE = (8.6, 2.6)
SIDES = {"ddp": ("DDP", INK, "-", 3.2), "full_shard": ("zshard full_shard", OUR_COLOUR, "--", 1.4)}
"""Strategy -> label, colour, dashes, width."""


def main(argv: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(description="Draw an example's losses under DDP and full_shard.")
    made.add_argument("--example", choices=examples.NAMES, default="image_gpt")
    made.add_argument(
        "--results", type=Path, metavar="FILE", help="losses to draw (default: train)"
    )
    picture.add_out(made, OUT)
    args = made.parse_args(argv)
    draw(picture.read(args.results) if args.results else train(args.example), args.out)
    print(f"wrote {args.out}")


def train(example: str) -> dict[str, Any]:
    """Run an example under both, write the losses to benchmarks/results and return the record."""
    folder = harness.ROOT / "runs" / "losses"
    runs = {
        strategy: examples.run(example, strategy, [], folder / f"{example}-{strategy}.json")
        for strategy in SIDES
    }
    record = {
        "benchmark": "losses",
        "machine": harness.machine(),
        "example": example,
        "differs_at": examples.differs_at(runs["full_shard"], runs["ddp"]),
        "losses": {strategy: numbers["losses"] for strategy, numbers in runs.items()},
    }
    today = datetime.date.today().isoformat()
    (harness.RESULTS / f"{today}-losses.json").write_text(json.dumps(record))
    return record


def caption(record: Mapping[str, Any]) -> str:
    """Return the line below the picture: are the losses equal, and what was trained where."""
    steps = len(record["losses"]["ddp"][0])
    where, at = record["machine"], record["differs_at"]
    same = (
        f"equal to the last bit in all {steps} steps, on both ranks"
        if at is None
        else (f"equal to the last bit until step {at}")
    )
    return (
        f"{record['example']}.py: {same}. {where['cpu']}, torch {where['torch']}, "
        f"{str(where['date'])[:10]}."
    )


def draw(record: Mapping[str, Any], out: Path) -> None:
    """Draw rank 0's losses, one line on the other."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        figure = Figure(figsize=SIZE)
        axes = figure.subplots()
        for strategy, (label, colour, dashes, width) in SIDES.items():
            losses = record["losses"][strategy][0]
            steps = range(1, len(losses) + 1)
            axes.plot(steps, losses, dashes, color=colour, linewidth=width, label=label)
        finish(axes, "Training loss of Image GPT on digits, two CPU ranks")
        figure.text(0.012, 0.025, caption(record), fontsize=7.5, color=picture.FAINT)
        figure.subplots_adjust(left=0.06, right=0.985, top=0.89, bottom=0.24)
        picture.save(figure, out)


if __name__ == "__main__":
    harness.start(main)
