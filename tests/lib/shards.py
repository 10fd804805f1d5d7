"""All cases of all tests, in parts that one sitting can run: `make thorough SHARD=3/16`.

A case's shard depends on its name only. Passed cases are noted under build/, by commit, so that a
shard that was broken off continues where it was. A finished one is recorded in tests/shards.json, which is
committed: part, commit, date, counts, failures.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "shards.json"


class Shard:
    """The shard of this run, as a plugin: notes how each case ended, and records the whole."""

    def __init__(self, name: str) -> None:
        self.name, self.start = name, time.monotonic()
        self.commit = git("rev-parse", "--short=12", "HEAD")
        if git("status", "--porcelain", "--", ".", ":!tests/shards.json"):
            self.commit += "+"  # and changes
        self.notes = ROOT / "build" / "shards" / f"{name.replace('/', '-')}-{self.commit}.jsonl"

    def ended(self) -> dict[str, str]:
        """Return how the cases ended that have run at this commit."""
        if not self.notes.exists():
            return {}
        lines = map(json.loads, self.notes.read_text().splitlines())
        return {name: outcome for name, outcome in lines if name}

    def note(self, name: str, outcome: Any) -> None:
        self.notes.parent.mkdir(parents=True, exist_ok=True)
        with self.notes.open("a") as file:
            file.write(json.dumps([name, outcome]) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.note(report.nodeid, report.outcome)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self.note("", round(time.monotonic() - self.start))
        ends = (
            pytest.ExitCode.OK,
            pytest.ExitCode.TESTS_FAILED,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        )
        options = session.config.option
        chosen = options.keyword or options.markexpr or options.maxfail
        if exitstatus not in ends or chosen or session.config.args != ["tests"]:
            return  # not the whole shard
        known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        known[self.name] = self._record()
        in_order = sorted(known, key=lambda name: [*map(int, reversed(name.split("/")))])
        RECORD.write_text(json.dumps({name: known[name] for name in in_order}, indent=1) + "\n")

    def _record(self) -> dict[str, Any]:
        lines = map(json.loads, self.notes.read_text().splitlines())
        ended = self.ended()
        counts = {
            what: sum(outcome == what for outcome in ended.values())
            for what in ("passed", "skipped")
        }
        return {
            "commit": self.commit,
            "date": datetime.date.today().isoformat(),
            **counts,
            "minutes": round(sum(value for name, value in lines if not name) / 60, 1),
            "failed": sorted(name for name, outcome in ended.items() if outcome == "failed"),
        }


def git(*words: str) -> str:
    """Return the output of a git command."""
    command = ["git", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def when_all_ran() -> str:
    """Say how many cases there are and when they last ran."""
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    counts = Counter(int(name.split("/")[1]) for name in known)
    parts = counts.most_common(1)[0][0] if counts else 0
    runs = [run for name, run in known.items() if name.endswith(f"/{parts}")]
    if not runs:
        return "all cases have not run yet (make thorough)"
    cases = sum(run["passed"] + run["skipped"] + len(run["failed"]) for run in runs)
    dates = sorted(run["date"] for run in runs)
    return (
        f"{len(runs)} of {parts} shards of all cases, {cases:,} cases, ran from {dates[0]} to "
        f"{dates[-1]} (make thorough)"
    )
