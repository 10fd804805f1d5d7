"""Write docs/transformers_classes.md: classes of transformers under FSDP(model), beside DDP's bits.

    python docs/tools/class_table.py [--only GPT2LMHeadModel ...] [--out PAGE.md]

One class for each kind of model that transformers has (tests/lib/tiny_classes.py). Two ranks
train it under DDP, under FSDP with no argument, and under DDP again if those differ.
Facts are appended to a file, a line per class: a second run trains only what is not there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "lib"))

import tiny_classes
import torch
import transformers
from class_facts import SHOWN, STEPS, trained
from nursery import fork_ranks

import zshard

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "transformers_classes.md"
FACTS = ROOT / "build" / "class_table.jsonl"
LIMIT = 240  # seconds for a class
transformers.logging.set_verbosity_error()

HEAD = """# Model classes of transformers

One class for each kind of model in transformers {transformers}, tiny, from its default
configuration. Two ranks train it for {steps} steps under DDP (`find_unused_parameters=True`)
and under a bare `FSDP(model)`, with the class's own dropout. Each rank has its own batch; the loss
is the mean square of the outputs. Equal: all losses, parameters and buffers, bit for bit. Made
by `docs/tools/class_table.py` on {date} with torch {torch} and zshard {zshard}.

| | classes |
|---|---|
"""


def facts_of(name: str) -> dict[str, Any]:
    """Train a class on two ranks; return its facts, or how the ranks failed."""
    results = fork_ranks(trained, 2, name, timeout=LIMIT)
    late = any(result.returncode is None for result in results)
    failed = [result for result in results if result.returncode != 0]
    if not failed:
        facts = dict(results[0].value)
        for other in results[1:]:
            for key in ("differs", "ddp differs"):
                facts[key] = facts.get(key) or other.value.get(key, [])
        return facts
    lines = [line for result in failed for line in result.stderr.strip().splitlines()[-1:]]
    return {"failed": f"took more than {LIMIT} s" if late else " / ".join(lines)[:300]}


# --- the page -------------------------------------------------------------------------------------

SOURCES = {"_fsdp_plan": "plan", "_no_split_modules": "no_split", "rule": "zshard's rule"}


def verdict(row: dict[str, Any]) -> str:
    """Return the last cell of a row: equal, or why not."""
    if "misfit" in row:
        return f"not run: {row['misfit']}"
    if "failed" in row:
        return f"not run: {row['failed']}"
    if not row["finite"]:
        return "not run: losses under DDP are not finite"
    if row["differs"] and row["ddp differs"]:
        return "not run: two runs under DDP differ"
    return f"**no**: {row['differs'][0]}" if row["differs"] else "yes"


def line(row: dict[str, Any]) -> str:
    units = [f"{count} {name}" for name, count in row.get("units", {}).items()]
    more = [f"{len(units) - SHOWN} more kinds"] if len(units) > SHOWN else []
    source = SOURCES[row["source"]] if "source" in row else ""
    answer = verdict(row).replace("|", "/").replace("<", "").replace(">", "")
    return f"| {row['class']} | {source} | {', '.join(units[:SHOWN] + more)} | {answer} |"


def page(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    today = datetime.date.today().isoformat()
    yield HEAD.format(**versions, zshard=zshard.__version__, date=today, steps=STEPS)
    yield from totals(rows)
    yield "\nThe units of a class are those of its tiny form, without the root.\n"
    for title, wanted in (("Trained", True), ("Not run", False)):
        yield f"\n## {title}\n\n| class | units from | units | DDP's bits |\n|---|---|---|---|\n"
        for row in rows:
            if verdict(row).startswith("not run") != wanted:
                yield line(row) + "\n"


def totals(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    run = [row for row in rows if not verdict(row).startswith("not run")]
    equal = [row for row in run if verdict(row) == "yes"]
    classes = len(tiny_classes.representatives())
    yield f"| of transformers, one for each kind of model | {classes} |\n"
    yield f"| tried | {len(rows)} |\n"
    yield f"| trained | {len(run)} of {len(rows)} |\n"
    yield f"| equal to DDP | {len(equal)} of {len(run)} |\n"
    for source, name in SOURCES.items():
        here = [row for row in run if row["source"] == source]
        good = sum(verdict(row) == "yes" for row in here)
        yield f"| blocks from: {name} | {len(here)}, equal: {good} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", help="these classes")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    names = options.only or list(tiny_classes.representatives())
    lines = FACTS.read_text().splitlines() if FACTS.exists() else []
    known = {row["class"]: row for row in map(json.loads, lines)}
    for name in names:
        if name not in known:
            known[name] = {"class": name, **facts_of(name)}
            with FACTS.open("a") as file:
                file.write(json.dumps(known[name]) + "\n")
            print(line(known[name]), flush=True)
    options.out.write_text("".join(page([known[name] for name in sorted(known)])))


if __name__ == "__main__":
    main()
