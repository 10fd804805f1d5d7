"""The rows of the failure matrix (benchmarks/failures): zshard does what each says, and the page
docs/failures.md has what was measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests" / "project")]

import failure_page  # noqa: E402
from named import problem_with  # noqa: E402

from benchmarks.failures.__main__ import run  # noqa: E402
from benchmarks.failures.play import SCRIPTS  # noqa: E402
from benchmarks.failures.rows import ROWS, Outcome, Row, judge  # noqa: E402

TIMEOUT = 2.5
RUN = [row for row in ROWS.values() if row.scripts]
RESULTS, RECORD = failure_page.read(sorted((ROOT / "benchmarks/results").glob("*-failures.json")))


def fits(row: Row, found: Outcome) -> bool:
    """Return whether an outcome under zshard is the one that the row asks for."""
    if row.zshard in ("correct", "silent"):
        return found.kind == row.zshard
    raised = found.kind in ("error", "timeout") and found.error == row.zshard
    return raised and found.named and (found.everywhere or row.leaves)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("row", RUN, ids=lambda row: row.id)
def test_outcome(row: Row) -> None:
    found = run(row, "zshard", TIMEOUT)
    assert fits(row, found), found


def test_other_outcomes_do_not_fit() -> None:
    killed, right = ROWS["S3a"], ROWS["W1"]
    good = Outcome("error", "PeerError", "rank 1 exited", 0.1, named=True, everywhere=True)
    assert fits(killed, good) and fits(right, Outcome("correct"))
    assert not fits(right, good) and not fits(right, Outcome("silent"))
    for bad in (
        Outcome("correct"),
        Outcome("hang"),
        Outcome("crash", "SIGABRT"),
        Outcome("error", "RuntimeError", "rank 1", 0.1, named=True, everywhere=True),
        Outcome("error", "PeerError", "a rank", 0.1, named=False, everywhere=True),
        Outcome("error", "PeerError", "rank 1", 0.1, named=True, everywhere=False),
    ):
        assert not fits(killed, bad), bad


class Ended:
    """A rank's end as judge() takes it."""

    def __init__(self, rank: int, returncode: int | None, stderr: str = "") -> None:
        self.rank, self.returncode, self.stderr = rank, returncode, stderr


def answer(folder: Path, rank: int, **what: object) -> None:
    (folder / f"answer{rank}").write_text(
        failure_page.json.dumps({"began": 0.0, "at": 9.0, **what})
    )


def test_each_kind_of_outcome(tmp_path: Path) -> None:
    def judged(*ended: Ended) -> Outcome:
        return judge(ROWS["S3a"], tmp_path, ended, timeout=20)

    both = Ended(0, 0), Ended(1, 0)
    assert judged(Ended(0, None), both[1]).kind == "hang"
    assert judged(Ended(0, -6), both[1]) == Outcome("crash", "SIGABRT")
    answer(tmp_path, 0, wrong="NaN")
    assert judged(*both) == Outcome("silent", message="NaN")
    answer(tmp_path, 1, error="PeerError", message="rank 1 exited")
    found = judged(both[0], Ended(1, 1))
    assert (found.kind, found.seconds, found.named, found.everywhere) == ("error", 9.0, True, False)
    assert judge(ROWS["S3a"], tmp_path, both, timeout=10).kind == "timeout"
    answer(tmp_path, 0)
    (tmp_path / "victim1").touch()
    assert judged(*both).kind == "correct"
    assert judged(Ended(0, 1, "zshard.DivergenceError: late"), both[1]).error == "DivergenceError"


def test_rows_name_their_scripts_and_tests() -> None:
    assert [problem for row in ROWS.values() if (problem := problem_with(row.test))] == []
    calls = [call.split()[0] for row in RUN for call in row.scripts]
    assert [name for name in calls if name not in SCRIPTS] == []
    assert {row.id[0] for row in ROWS.values()} <= set(failure_page.SECTIONS)


def test_page_has_what_was_measured() -> None:
    missing = [(r.id, s) for r in RUN for s in r.sides if (r.id, s) not in RESULTS]
    assert missing == []
    ours = [ROWS[name] for name, side in RESULTS if side == "zshard"]
    fields = [name for name in Outcome.__dataclass_fields__]
    measured = {
        row.id: Outcome(**{f: RESULTS[row.id, "zshard"][f] for f in fields}) for row in ours
    }
    assert [row.id for row in ours if not fits(row, measured[row.id])] == []
    text = "\n".join(failure_page.page(RESULTS, RECORD)) + "\n"
    assert failure_page.OUT.read_text() == text, "run: python tools/failure_page.py"
