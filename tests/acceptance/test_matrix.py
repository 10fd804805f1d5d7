"""The rows of the failure matrix: zshard behaves as each says, and docs/failures.md has the
measured outcomes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "docs" / "tools"), str(ROOT / "tests" / "project")]

import failure_page  # noqa: E402
from matrix import ROWS, SCRIPTS, Outcome, Row, run  # noqa: E402
from named import problem_with  # noqa: E402

TIMEOUT = 2.5
RUN = [row for row in ROWS.values() if row.scripts]


def fits(row: Row, outcome: Outcome) -> bool:
    """Return whether an outcome under zshard is the one that the row asks for."""
    if row.zshard in ("correct", "silent"):
        return outcome.kind == row.zshard
    raised = outcome.kind in ("error", "timeout") and outcome.error == row.zshard
    return raised and outcome.named and (outcome.everywhere or row.leaves)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("row", RUN, ids=lambda row: row.id)
def test_outcome(row: Row) -> None:
    outcome = run(row, "zshard", TIMEOUT)
    assert fits(row, outcome), outcome


def test_rows_name_their_scripts_and_tests() -> None:
    assert [problem for row in ROWS.values() if (problem := problem_with(row.test))] == []
    assert {call.split()[0] for row in RUN for call in row.scripts} <= SCRIPTS.keys()
    assert {row.id[0] for row in ROWS.values()} <= failure_page.SECTIONS.keys()


def test_page_has_what_was_measured() -> None:
    results, record = failure_page.read()
    assert [(r.id, s) for r in RUN for s in r.sides if (r.id, s) not in results] == []
    fields = [*Outcome.__dataclass_fields__]
    for row in RUN:
        assert fits(row, Outcome(**{f: results[row.id, "zshard"][f] for f in fields})), row.id
    text = "\n".join(failure_page.page(results, record)) + "\n"
    assert failure_page.OUT.read_text() == text, "run: python docs/tools/failure_page.py"
