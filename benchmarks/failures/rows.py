"""The rows of the failure matrix (rows.txt), and how the outcome of one is told from its ranks."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

SIDES = ("ddp", "fsdp2", "zshard")
ERROR = re.compile(r"^(?:[\w.]+\.)?(\w+(?:Error|Interrupt)): (.*)", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """A line of rows.txt.

    zshard: what it must do: "correct", "silent", or raise this exception on all ranks.
    names: a pattern of what a useful message contains. scripts: calls of scripts.py, which run one
    after another in fresh processes with one folder; without any, the test alone injects the fault.
    worlds: the ranks of each. begun: there is a process group. leaves: a rank may have ended
    without an error before the others raise.
    """

    id: str
    fault: str
    zshard: str
    names: str
    scripts: Sequence[str]
    test: str
    sides: Sequence[str] = SIDES
    worlds: Sequence[int] = (2, 2)
    begun: bool = True
    leaves: bool = False

    @classmethod
    def of(cls, line: str) -> Row:
        id, fault, zshard, names, scripts, options, test = map(str.strip, line.split(" | "))
        given = dict(option.partition("=")[::2] for option in options.split())
        more: dict[str, Any] = {"begun": "unbegun" not in given, "leaves": "leaves" in given}
        if "sides" in given:
            more["sides"] = given["sides"].split(",")
        if "worlds" in given:
            more["worlds"] = [int(world) for world in given["worlds"].split(",")]
        return cls(
            id, fault, zshard, names, scripts.split(" then ") if scripts else (), test, **more
        )


LINES = (Path(__file__).parent / "rows.txt").read_text().splitlines()
ROWS = {row.id: row for row in map(Row.of, LINES[1:])}


class Ended(Protocol):
    """How a rank ended: tests/lib/spawn.py's RankResult."""

    rank: int
    returncode: int | None
    stderr: str


@dataclass(frozen=True)
class Outcome:
    """What a row did under one library.

    kind: "correct", "silent" (a wrong result without an error), "error", "timeout" (an error that
    only the timeout brought), "hang" or "crash" (a signal that was not injected).
    seconds: from the fault to the error on the last rank. named: whether all messages contain
    what `Row.names` asks for. everywhere: whether all ranks but a killed one raised.
    """

    kind: str
    error: str = ""
    message: str = ""
    seconds: float | None = None
    named: bool = False
    everywhere: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(row: Row, folder: Path, ended: Sequence[Ended], timeout: float) -> Outcome:
    """Return the outcome of a script from its ranks' answers. timeout: seconds, of their group."""
    judged = [end for end in ended if not (folder / f"victim{end.rank}").exists()]
    answers = [_answer(folder, end) for end in judged]
    if any(end.returncode is None for end in judged):
        return Outcome("hang")
    for end, answer in zip(judged, answers, strict=True):
        if (end.returncode or 0) < 0 and not answer["error"]:
            return Outcome("crash", error=signal.Signals(-(end.returncode or 0)).name)
    failed = [answer for answer in answers if answer["error"]]
    if failed:
        return _failure(row, folder, failed, len(failed) == len(judged), timeout)
    wrong = [answer["wrong"] for answer in answers if answer["wrong"]]
    return Outcome("silent", message=wrong[0]) if wrong else Outcome("correct")


def _answer(folder: Path, end: Ended) -> dict[str, Any]:
    """Return what a rank has written; the error in its output if it failed after that."""
    path = folder / f"answer{end.rank}"
    blank = {"error": "", "message": "", "wrong": "", "began": None, "at": None}
    answer: dict[str, Any] = blank | (json.loads(path.read_text()) if path.exists() else {})
    if (end.returncode or 0) > 0 and not answer["error"]:
        found = ERROR.findall(end.stderr) or [("exit status", str(end.returncode))]
        answer["error"], answer["message"] = found[-1]
    return answer


def _failure(
    row: Row, folder: Path, failed: Sequence[dict[str, Any]], everywhere: bool, timeout: float
) -> Outcome:
    stamp = folder / "fault"
    began = [answer["began"] for answer in failed if answer["began"]]
    since = float(stamp.read_text()) if stamp.exists() else min(began, default=0.0)
    seconds = max((answer["at"] - since for answer in failed if answer["at"]), default=None)
    first = min(failed, key=lambda answer: answer["at"] or float("inf"))
    named = all(re.search(row.names, answer["message"], re.IGNORECASE) for answer in failed)
    kind = "timeout" if seconds is not None and seconds > 0.75 * timeout else "error"
    return Outcome(kind, first["error"], first["message"][:400], seconds, named, everywhere)
