"""The feature tables of docs/features.md: what they say of zshard names its test."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from named import problem_with

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ["feature", "zshard", "DDP", "FSDP1", "FSDP2", "DeepSpeed", "test"]
WITHOUT_TEST = ("no", "-")  # what zshard's cell says where there is nothing to show


class Row(NamedTuple):
    feature: str
    zshard: str
    others: tuple[str, ...]
    test: str


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def rows(text: str) -> list[Row]:
    """The rows of all feature tables in a text, in their order."""
    found, inside = [], False
    for line in text.splitlines():
        row = cells(line) if line.startswith("|") else []
        inside = row == COLUMNS or (inside and bool(row))
        if inside and row != COLUMNS and not row[0].startswith("---"):
            found.append(Row(row[0], row[1], tuple(row[2:-1]), row[-1]))
    return found


def problem_of(row: Row) -> str:
    texts = (row.feature, row.zshard, *row.others, row.test)
    if len(texts) != len(COLUMNS) or not all(texts):
        return f"{row.feature}: cells are missing"
    if row.zshard in WITHOUT_TEST:
        return "" if row.test == "-" else problem_with(row.test)
    return problem_with(row.test)


TABLE = rows((ROOT / "docs" / "features.md").read_text())


def test_each_claim_names_its_test():
    assert len(TABLE) >= 80
    assert [problem for row in TABLE if (problem := problem_of(row))] == []


def test_features_are_unique():
    features = [row.feature for row in TABLE]
    assert len(set(features)) == len(features)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("| a | yes | no | no | no | no | - |", "no such file"),
        ("| a | over shm | no | no | no | no | tests/optim/test_no.py |", "no such file"),
        (
            "| a | yes | no | no | no | no | tests/optim/test_clip.py::test_no |",
            "no test of that name",
        ),
        ("| a | yes | no | no | no | tests/optim/test_clip.py |", "cells are missing"),
        ("| a | yes | no | no |  | no | tests/optim/test_clip.py |", "cells are missing"),
        ("| a | yes | no | no | no | no | - |", "no such file"),
        ("| a | yes | no | no | no | no | tests/optim/test_clip.py |", ""),
        ("| a | no | no | no | no | no | - |", ""),
    ],
)
def test_rows_without_a_test_are_found(line, complaint):
    header = "| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|\n"
    (row,) = rows(f"{header}{line}\n\n| b | yes |\n")
    assert complaint in problem_of(row) and bool(complaint) == bool(problem_of(row))
