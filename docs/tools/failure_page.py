"""Write docs/failures.md: what DDP, FSDP2 and zshard do at each fault of the failure matrix.

    python docs/tools/failure_page.py

Of all benchmarks/results/*-failures.json (tests/acceptance/matrix.py), a later file replaces rows
of the earlier ones.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "acceptance"))
from matrix import ROWS, SIDES, Row  # noqa: E402

OUT = ROOT / "docs" / "failures.md"
Results = Mapping[tuple[str, str], dict[str, Any]]

SECTIONS = {
    "W": "Models",
    "S": "Steps",
    "R": "Actions of one rank alone",
    "C": "Mismatched collective calls",
    "E": "Processes",
    "V": "Saves",
    "L": "Loads",
    "F": "Seen in practice",
    "X": "Malicious and malformed files",
    "N": "Long runs and threads",
}
KINDS = {
    "correct": "correct",
    "named": "an immediate error that names the rank, the parameter or the file",
    "error": "another immediate error",
    "timeout": "an error after the timeout",
    "crash": "a crash (SIGABRT, SIGSEGV)",
    "hang": "a hang beyond the timeout",
    "silent": "**silent: a wrong result without an error**",
}
HEAD = """# Failure matrix

See how DDP, FSDP2 and zshard react to common faults. Each fault is injected for real: a process is
killed, a file is truncated, a batch is missing. The same short script runs under all three with two
ranks over gloo, in fresh processes. Tests of zshard inject the fault in more places and under more
strategies and transports. Measured on {date} with torch {torch}, on CPUs.
`python tests/acceptance/matrix.py` runs the scripts; `docs/tools/failure_page.py` writes this page.

- **correct**: the result equals that of the plain model on all batches, or the saved values.
- **silent**: the result is wrong, and no rank raises an error or exits with a nonzero status.
- An exception, with the seconds from the fault to the error on the last rank. *named*: its message
  names the cause, such as the rank, the parameter or the file.
- **timeout**: only the timeout ended the wait, here {timeout:g} s; PyTorch's default is 30 minutes.
- **SIGABRT**, **SIGSEGV**: a process crashed.
- *by test*: only a test of zshard injects the fault. "-": the library has no equivalent.

DDP and FSDP2 run with their defaults. DDP saves with `torch.save` on rank 0, FSDP2 with
`torch.distributed.checkpoint`.
"""


def read() -> tuple[Results, dict[str, Any]]:
    """Return the results by row and side, and the record of the first file."""
    files = sorted((ROOT / "benchmarks" / "results").glob("*-failures.json"))
    records = [json.loads(path.read_text()) for path in files]
    results = {(each["row"], each["side"]): each for one in records for each in one["results"]}
    return results, records[0]


def kind_of(result: Mapping[str, Any], row: Row) -> str:
    kind = str(result["kind"])
    return "named" if kind == "error" and row.names and result["named"] else kind


def cell(row: Row, side: str, results: Results) -> str:
    """Return what a library did."""
    result = results.get((row.id, side))
    if result is None:
        if side != "zshard" or row.scripts:
            return "-"
        return f"{row.zshard if row.zshard == 'correct' else f'`{row.zshard}`'} *by test*"
    kind, error = result["kind"], f"`{result['error']}`"
    if kind == "silent":
        return f"**silent**: {result['message']}"
    if kind in ("correct", "hang"):
        return str(kind)
    if kind == "crash":
        return f"**{result['error']}**"
    seconds = result["seconds"]
    when = "at exit" if seconds is None else f"{max(seconds, 0.01):.2f} s"
    named = "*named*" if row.names and result["named"] else ""
    return ", ".join(filter(None, (error, "**timeout**" if kind == "timeout" else when, named)))


def page(results: Results, record: Mapping[str, Any]) -> Iterator[str]:
    machine, timeout = record["machine"], record["settings"]["timeout"]
    yield HEAD.format(date=machine["date"][:10], torch=machine["torch"], timeout=timeout)
    yield from totals(results)
    for letter, title in SECTIONS.items():
        yield f"\n## {title}\n"
        yield "| row | fault | DDP | FSDP2 | zshard | test |\n|---|---|---|---|---|---|"
        for row in (row for row in ROWS.values() if row.id[0] == letter):
            cells = [row.id, row.fault, *(cell(row, side, results) for side in SIDES)]
            path, _, name = row.test.partition("::")
            test = f"[{name.partition('[')[0].removeprefix('test_')}](../{path})"
            yield "| " + " | ".join([*cells, test]) + " |"


def totals(results: Results) -> Iterator[str]:
    """The counts of outcomes and the times to an error."""
    yield "## Summary\n"
    yield "| outcome | DDP | FSDP2 | zshard |\n|---|---|---|---|"
    kinds: dict[str, list[str]] = {side: [] for side in SIDES}
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for (name, side), result in results.items():
        kinds[side].append(kind_of(result, ROWS[name]))
        if result["kind"] == "error" and result["seconds"] is not None:
            times[side].append(result["seconds"])
    for kind, words in KINDS.items():
        yield f"| {words} | " + " | ".join(str(kinds[side].count(kind)) for side in SIDES) + " |"
    yield "| rows that ran | " + " | ".join(str(len(kinds[side])) for side in SIDES) + " |"
    middle = (f"{statistics.median(times[s]):.2f} s, {max(times[s]):.2f} s" for s in SIDES)
    yield "| time to an immediate error: median, maximum | " + " | ".join(middle) + " |"
    tested = sum(not row.scripts for row in ROWS.values())
    yield f"\nAnother {tested} faults are injected only by zshard's own tests."


if __name__ == "__main__":
    OUT.write_text("\n".join(page(*read())) + "\n", encoding="utf-8")
    print(f"wrote {OUT}")
