"""Draw the timeline of docs/recovery.md: one recovery, of a run of benchmarks.recovery_time.

    python tools/recovery_picture.py benchmarks/results/2026-11-27-recovery.json [--out FILE]

Of the kept run's kills, it takes the one with the median time.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from svg import EMPTY, FAINT, INK, RANKS, WIDTH, Svg

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.recovery_time import SCRIPTS_OWN, STAGES  # noqa: E402

OUT = ROOT / "docs" / "images" / "recovery.svg"
LEFT, RIGHT, ROW = 250, 60, 24


def drawn(result: dict[str, Any]) -> Svg:
    kills = sorted(result["kills"], key=lambda kill: kill["recovered"])
    kill = kills[len(kills) // 2]
    svg = Svg(ROW * (len(STAGES) + 3), "From kill -9 of a rank to the next completed step")
    scale = (WIDTH - LEFT - RIGHT) / kill["all"]
    svg.text(LEFT, 16, "kill -9", 11, FAINT)
    at = 0.0
    for row, (stage, label) in enumerate(STAGES.items(), 1):
        seconds, y = kill["stages"][stage], ROW * row
        svg.box(LEFT, y + 19, WIDTH - LEFT - RIGHT, 1, EMPTY)
        svg.text(LEFT - 10, y + 12, label, 12, INK, "end")
        colour = EMPTY if stage in SCRIPTS_OWN else RANKS[0]
        svg.box(LEFT + scale * at, y, max(1.0, scale * seconds), 17, colour, FAINT)
        at += seconds
        svg.text(LEFT + scale * at + 6, y + 13, f"{seconds:.2f} s", 11, FAINT, "start")
    words = f"{result['model']}, {result['ranks']} ranks: {at:.2f} s in all, "
    words += f"{kill['recovered']:.2f} s without the grey bars, which are the script's own"
    svg.text(14, ROW * (len(STAGES) + 2), words, 11, FAINT, "start")
    return svg


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the timeline of a recovery.")
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    results = json.loads(args.results.read_text())["results"]
    drawn(next(each for each in results if each["side"] == "kept")).write(args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
