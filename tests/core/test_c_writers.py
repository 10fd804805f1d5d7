"""A struct's fields are written by one file, so that whoever asks who changed one knows where to look.

The core's records are always reached by variables of one name (`unit`, `record`), so an
assignment through that name shows which field of which struct a file writes. What makes and frees a
struct may write all of it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"
FOLDERS = ("schedule", "unit", "reduce", "engine", "python")
MAKERS = {"unit_life.c", "unit_memory.c"}
"""Make units, before anybody else sees them."""

VARIABLES = {
    "record": "zs_record",
    "round": "zs_round",
    "span": "zs_span",
    "early": "zs_early",
    "lease": "zs_lease",
    "schedule": "zs_schedule",
    "unit": "zs_unit",
    "param": "zs_param",
    "flat": "zs_flat",
    "context": "zs_context",
    "engine": "zs_engine",
    "history": "zs_history",
}
WRITE = re.compile(
    r"(?<![\w>.])(" + "|".join(VARIABLES) + r")(?:->)([\w.]+)(?:\[\w+\])?"
    r"\s*(?:=(?!=)|\|=|\+=|-=|\^=|\+\+|--)"
    r"|(?:\+\+|--)(" + "|".join(VARIABLES) + r")->([\w.]+)"
)
KNOWN = {
    # A pass is a forward or a backward, and each file knows when its own begins and ends.
    "zs_schedule.stage": {"forward.c", "backward.c"},
    # Under local gradients: shown so by one, found to be zeroed by the other.
    "zs_param.below": {"grads.c", "local_grads.c"},
    # Set by a write within a forward, cleared by the pass that continues it.
    "zs_engine.interrupted": {"acts.c", "backward_events.c"},
    # Taken and freed; taking turns where a script keeps gradients.
    "zs_flat.grad_mem": {"grad_memory.c", "kept_grads.c"},
    "zs_unit.grads_held": {"grad_memory.c", "kept_grads.c"},
}


def writers() -> dict[str, set[str]]:
    """Which files write which field, "zs_unit.name", but for those that make its struct."""
    found: dict[str, set[str]] = defaultdict(set)
    files = [path for folder in FOLDERS for path in (CSRC / folder).glob("*.c")]
    assert len(files) > 30, "no C sources found: has csrc/ moved?"
    for path in files:
        text = path.read_text()
        code = re.sub(r"/\*.*?\*/|\"(?:\\.|[^\"\\])*\"", "", text, flags=re.DOTALL)
        code = code.replace("zs_engine_unit(engine, i)->", "unit->")
        for match in WRITE.finditer(code):
            variable = match.group(1) or match.group(3)
            field = match.group(2) or match.group(4)
            if path.name not in MAKERS:
                found[f"{VARIABLES[variable]}.{field}"].add(path.name)
    return found


def test_a_field_has_one_writer() -> None:
    several = {field: names for field, names in writers().items() if len(names) > 1}
    assert several == KNOWN
