"""hosts.py's results as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import MIB, Spread


def markdown(result: Mapping[str, Any]) -> str:
    """Return one result's title and table."""
    lines = _operations(result) if "operations" in result else _steps(result)
    return "\n".join(["", _title(result), "", *lines])


def _title(result: Mapping[str, Any]) -> str:
    limit = f"{result['gbit']:g} Gbit/s" if result["gbit"] else "no limit"
    what = "gloo"
    if "model" in result:
        what = f"{result['model']} ({result['parameters'] / 1e6:.1f} M parameters)"
    reached = f"one connection reaches {result['reached_gbit']:.2f}"
    layout = f"{result['hosts']} hosts x {result['ranks_per_host']} ranks"
    return f"**{what}, {layout}, {limit}** ({reached})"


def _steps(result: Mapping[str, Any]) -> list[str]:
    header = ["side", "ms", "x ddp min/med/max", "MB sent by a host", "least", "sent / least"]
    header += ["MiB of a host: peak", "held", "predicted", "loss diff"]
    rows = []
    for name, side in result["sides"].items():
        sent = max(side["wire"]["sent"])
        least, difference = side["least_bytes"], side["loss_difference"]
        ratio, mib = side["ratio"], {key: max(of) / MIB for key, of in side["bytes"].items()}
        rows.append(
            [
                name.replace("-auto", "", 1).replace("-keep_", ", keep_gathered="),
                f"{side['ms']['median']:.0f}",
                Spread(**ratio).text(2) if ratio else "",
                f"{sent / 1e6:.1f}",
                f"{least / 1e6:.1f}",
                f"{sent / least:.2f}",
                *(f"{mib[key]:.0f}" if key in mib else "" for key in ("peak", "held", "predicted")),
                "" if difference is None else f"{difference:.1e}" if difference else "0",
            ]
        )
    return table(header, rows)


def _operations(result: Mapping[str, Any]) -> list[str]:
    """Sizes side by side: GB/s and, in brackets, milliseconds."""
    sizes = sorted({entry["mib"] for entry in result["operations"]})
    cells: dict[tuple[str, int], dict[float, str]] = {}
    for entry in result["operations"]:
        key = entry["operation"], entry["groups"]
        text = f"{entry['gb_per_s']:.3f} ({entry['ms']['median']:.1f})"
        cells.setdefault(key, {})[entry["mib"]] = text
    header = ["GB/s (ms)", "groups", *(f"{mib:g} MiB" for mib in sizes)]
    rows = [[name, str(groups), *map(of.get, sizes)] for (name, groups), of in cells.items()]
    return table(header, rows)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(map(str, line))} |" for line in lines]
