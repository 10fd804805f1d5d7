"""A struct's fields are written by one file, so that whoever asks who changed one knows where to look.

The core's records are always reached by variables of one name (`unit`, `record`), so an
assignment through that name shows which field of which struct a file writes. What makes and frees a
struct may write all of it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

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
    # A unit's engine, when it is made and when an outer FSDP() takes it over.
    "zs_unit.context": {"unit_life.c", "engine.c"},
    # Under local gradients: shown so by one, found to be zeroed by the other.
    "zs_param.below": {"grads.c", "local_grads.c"},
    # Set by a write within a forward, cleared by the pass that continues it.
    "zs_engine.interrupted": {"acts.c", "backward_events.c"},
    # Taken and freed; taking turns where a script keeps gradients.
    "zs_flat.grad_mem": {"grad_memory.c", "kept_grads.c"},
    "zs_unit.grads_held": {"grad_memory.c", "kept_grads.c"},
}

Writers = dict[str, set[str]]


def writers_in(files: Iterable[tuple[str, str]]) -> Writers:
    """Which files write which field, "zs_unit.name", but for those that make its struct."""
    found: Writers = defaultdict(set)
    for name, text in files:
        code = re.sub(r"/\*.*?\*/|\"(?:\\.|[^\"\\])*\"", "", text, flags=re.DOTALL)
        code = code.replace("zs_engine_unit(engine, i)->", "unit->")
        for match in WRITE.finditer(code):
            variable = match.group(1) or match.group(3)
            field = match.group(2) or match.group(4)
            if name not in MAKERS:
                found[f"{VARIABLES[variable]}.{field}"].add(name)
    return found


def complaints_of(writers: Writers) -> list[str]:
    """The fields that several files write, and may not."""
    return [
        f"{field} is written by {', '.join(sorted(names))}"
        for field, names in sorted(writers.items())
        if len(names) > 1 and not names <= KNOWN.get(field, set())
    ]


def sources() -> list[tuple[str, str]]:
    found = [path for folder in FOLDERS for path in sorted((CSRC / folder).glob("*.c"))]
    assert len(found) > 30, "no C sources found: has csrc/ moved?"
    return [(path.name, path.read_text()) for path in found]


def test_a_field_has_one_writer() -> None:
    assert complaints_of(writers_in(sources())) == []


def test_known_fields_have_these_writers() -> None:
    writers = writers_in(sources())
    for field, names in KNOWN.items():
        assert writers[field] == names - MAKERS, field


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("    unit->part = 1;", "zs_unit.part"),
        ("    unit->record.inside++;", "zs_unit.record.inside"),
        ("    --record->inside;", "zs_record.inside"),
        ("    zs_engine_unit(engine, i)->part = 2;", "zs_unit.part"),
        ("    schedule->gave_up |= true;", "zs_schedule.gave_up"),
    ],
)
def test_a_second_writer_is_found(text: str, field: str) -> None:
    writers = writers_in([("a.c", text), ("b.c", text)])
    assert complaints_of(writers) == [f"{field} is written by a.c, b.c"]


@pytest.mark.parametrize(
    "text", ["    if (unit->part == 1) return;", "    /* unit->part = 1; */", "    x = unit->part;"]
)
def test_reading_is_free(text: str) -> None:
    assert writers_in([("a.c", text)]) == {}
