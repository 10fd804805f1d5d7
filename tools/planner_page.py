"""Write docs/planner_accuracy.md: zshard's predictions beside published runs.

    python tools/planner_page.py RUNS.csv [--out docs/planner_accuracy.md]

The file of runs is not part of the repository; the page says where its rows come from.
"""

from __future__ import annotations

import argparse
import collections
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from zshard.planner import against
from zshard.planner.against import FEW, Compared, LeftOut

OUT = Path(__file__).resolve().parent.parent / "docs" / "planner_accuracy.md"
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

`python -m zshard plan --against RUNS.csv` predicts runs that others published, and compares. This
page is its result for {rows} rows of {sources} sources that state what a prediction needs. Each
device has one set of constants, fitted to its rows; no source and no row has constants of its own.
Where a row does not state the network, the device's usual one is assumed. Tokens per second or
seconds are compared, never TFLOP/s, which sources count in different ways. The file says where its
rows come from; write one with the same columns to compare runs of your own.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the page of predictions beside runs.")
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    found, left = against.compare(against.read(args.runs))
    args.out.write_text("\n".join(page(found, left)) + "\n", encoding="utf-8")
    print(f"wrote {args.out}")


def page(found: Sequence[Compared], left: Sequence[LeftOut]) -> Iterator[str]:
    rows, sources = {each.id for each in found}, {each.source for each in found}
    yield HEAD.format(rows=len(rows), sources=len(sources))
    for what in ("speed", "memory"):
        for apart in (False, True):
            chosen = [each for each in found if (each.what, bool(each.apart)) == (what, apart)]
            if chosen:
                yield from section(what, apart, chosen)
    yield "## Rows left out\n"
    yield "| rows | why |\n| --- | --- |"
    reasons = collections.Counter(each.reason for each in left)
    yield from (f"| {count} | {reason} |" for reason, count in reasons.most_common())


def section(what: str, apart: bool, chosen: Sequence[Compared]) -> Iterator[str]:
    title = "Speed" if what == "speed" else "Memory"
    yield f"## {title}, {'other software' if apart else 'FSDP and DeepSpeed'}\n"
    for key in ("source", "device"):
        groups = against.medians(chosen, key)
        errors = [error for n, error in groups.values() if n >= FEW]
        yield f"| {key} | rows | median of absolute errors |\n| --- | --- | --- |"
        for name, (n, error) in sorted(groups.items(), key=lambda item: -item[1][0]):
            yield f"| {name} | {n} | {error:.1%} |"
        if errors:
            words = f"median of those with {FEW} rows or more"
            yield f"| **{words}** | | **{statistics.median(errors):.1%}** |"
        yield ""
    if what == "speed" and not apart:
        yield from worst(chosen)


def worst(chosen: Sequence[Compared]) -> Iterator[str]:
    yield f"The {WORST} largest errors:\n"
    yield "| row | device | predicted | published | error | likely reason |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for each in sorted(chosen, key=lambda each: -abs(each.error))[:WORST]:
        numbers = f"{each.predicted:,.4g} | {each.published:,.4g} {each.unit} | {each.error:+.0%}"
        yield f"| {each.id} | {each.device} | {numbers} | {REASONS.get(each.id, 'not known')} |"
    yield ""


if __name__ == "__main__":
    main()
