"""The feature tables of docs/features.md: what they say of zshard has a test.

docs/contributing/feature_tests.md names it, by feature.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from named import problem_with

DOCS = Path(__file__).resolve().parents[2] / "docs"
COLUMNS = ["feature", "zshard", "DDP", "FSDP1", "FSDP2", "DeepSpeed"]
WITHOUT_TEST = ("no", "-")  # what zshard's cell says where there is nothing to show


class Row(NamedTuple):
    feature: str
    zshard: str
    others: tuple[str, ...]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(text: str, columns: list[str]) -> list[list[str]]:
    """The rows of all tables with these columns in a text, in their order."""
    found, inside = [], False
    for line in text.splitlines():
        row = cells(line) if line.startswith("|") else []
        inside = row == columns or (inside and bool(row))
        if inside and row != columns and not row[0].startswith("---"):
            found.append(row)
    return found


def rows(text: str) -> list[Row]:
    return [Row(row[0], row[1], tuple(row[2:])) for row in tables(text, COLUMNS)]


def by_feature(text: str) -> dict[str, str]:
    """The test of each feature."""
    return {feature: test for feature, test in tables(text, ["feature", "test"])}


def problem_of(row: Row, found: dict[str, str]) -> str:
    texts = (row.feature, row.zshard, *row.others)
    if len(texts) != len(COLUMNS) or not all(texts):
        return f"{row.feature}: cells are missing"
    test = found.get(row.feature)
    if test is None:
        return "" if row.zshard in WITHOUT_TEST else f"{row.feature}: no test"
    return problem_with(test)


TABLE = rows((DOCS / "features.md").read_text())
TESTS = by_feature((DOCS / "contributing" / "feature_tests.md").read_text())


def test_each_claim_has_a_test():
    assert len(TABLE) >= 80
    assert [problem for row in TABLE if (problem := problem_of(row, TESTS))] == []


def test_features_are_unique_and_tests_have_one():
    features = [row.feature for row in TABLE]
    assert len(set(features)) == len(features)
    assert set(TESTS) <= set(features)
