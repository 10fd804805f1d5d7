"""The failure matrix: each fault of sharded training on CPUs, under DDP, FSDP2 and zshard.

    python tests/acceptance/matrix.py [--rows S1 S2 ...] [--sides zshard] [--timeout 20]

A row (matrix_rows.txt) is a fault and a short script, the same for the three libraries, which runs on
fresh ranks; docs/tools/failure_page.py writes docs/failures.md from the outcomes. `timeout` is that of
gloo's process group, in seconds. A rank that still runs GRACE seconds after it counts as hanging.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "lib")]

import matrix_saving  # noqa: E402
import matrix_training  # noqa: E402
from matrix_job import Job  # noqa: E402
from nursery import fork_ranks  # noqa: E402

from benchmarks import harness  # noqa: E402

GRACE = 12.0
SIDES = ("ddp", "fsdp2", "zshard")
SCRIPTS: dict[str, Any] = vars(matrix_training) | vars(matrix_saving)
ERROR = re.compile(r"^(?:[\w.]+\.)?(\w+(?:Error|Interrupt)): (.*)", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """A line of matrix_rows.txt.

    zshard: the required outcome: "correct", "silent", or raise this exception on all ranks.
    names: a pattern for a useful message. scripts: calls of SCRIPTS, which run one
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
        id, fault, zshard, names, scripts, words, test = map(str.strip, line.split(" | "))
        options = dict(word.partition("=")[::2] for word in words.split())
        return cls(
            *(id, fault, zshard, names, scripts.split(" then ") if scripts else (), test),
            sides=options.get("sides", "ddp,fsdp2,zshard").split(","),
            worlds=[int(world) for world in options.get("worlds", "2,2").split(",")],
            begun="unbegun" not in options,
            leaves="leaves" in options,
        )


LINES = (Path(__file__).parent / "matrix_rows.txt").read_text().splitlines()
ROWS = {row.id: row for row in map(Row.of, LINES[1:])}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a row under one library.

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


# --- a rank ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def answering(path: Path) -> Iterator[dict[str, Any]]:
    """A context that writes a script's result or error, and the time."""
    answer: dict[str, Any] = {"began": time.monotonic()}
    try:
        yield answer
    except BaseException as error:
        if not isinstance(error, SystemExit):
            answer |= {"error": type(error).__name__, "message": str(error)}
        raise
    finally:
        answer["at"] = time.monotonic()
        path.write_text(json.dumps(answer))


def play(name: str, side: str, folder: str, phase: int, timeout: float) -> None:
    """Run a rank of a row's script; an exception ends the rank, as in a user's script."""
    script, *arguments = ROWS[name].scripts[phase].split()
    torch.set_num_threads(1)
    job = Job(side, Path(folder), timeout)
    if ROWS[name].begun:
        job.begin()
    with answering(job.folder / f"answer{job.rank}") as answer:
        answer["wrong"] = SCRIPTS[script](job, *arguments) or ""


# --- the outcome ----------------------------------------------------------------------------------


def judge(row: Row, folder: Path, ranks: Sequence[Any], timeout: float) -> Outcome:
    """Return the outcome of a script from its ranks' results and answers."""
    ranks = [rank for rank in ranks if not (folder / f"victim{rank.rank}").exists()]
    answers = [answer_of(folder, rank) for rank in ranks]
    if any(rank.returncode is None for rank in ranks):
        return Outcome("hang")
    for rank, answer in zip(ranks, answers, strict=True):
        if rank.returncode < 0 and not answer["error"]:
            return Outcome("crash", error=signal.Signals(-rank.returncode).name)
    failed = [answer for answer in answers if answer["error"]]
    if failed:
        return failure(row, folder, failed, len(failed) == len(ranks), timeout)
    wrong = [answer["wrong"] for answer in answers if answer["wrong"]]
    return Outcome("silent", message=wrong[0]) if wrong else Outcome("correct")


def answer_of(folder: Path, rank: Any) -> dict[str, Any]:
    """Return a rank's outcome; the error in its output if it failed after that."""
    path = folder / f"answer{rank.rank}"
    answer = {"error": "", "message": "", "wrong": "", "began": None, "at": None}
    answer |= json.loads(path.read_text()) if path.exists() else {}
    if (rank.returncode or 0) > 0 and not answer["error"]:
        errors = ERROR.findall(rank.stderr) or [("exit status", str(rank.returncode))]
        answer["error"], answer["message"] = errors[-1]
    return answer


def failure(
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


def run(row: Row, side: str, timeout: float) -> Outcome:
    """Run a row's scripts, one after another; return the first outcome that is not correct, or
    that of the last one. A script whose ranks are killed is not judged if another follows."""
    outcome = Outcome("correct")
    with tempfile.TemporaryDirectory(prefix="zshard-row-") as name:
        folder = Path(name)
        for phase, (_, world) in enumerate(zip(row.scripts, row.worlds, strict=False)):
            for file in (*folder.glob("answer*"), *folder.glob("fault")):
                file.unlink()
            arguments = (row.id, side, name, phase, timeout)
            ranks = fork_ranks(play, world, *arguments, timeout=timeout + GRACE)
            outcome = judge(row, folder, ranks, timeout)
            victims = [*folder.glob("victim*")]
            if outcome.kind != "correct" and not (victims and phase + 1 < len(row.scripts)):
                break
            for victim in victims:
                victim.unlink()
    return outcome


def main() -> None:
    full = {"rows": [*ROWS], "sides": [*SIDES], "timeout": 20.0}  # seconds, of gloo
    choices = {"rows": ROWS, "sides": SIDES}
    purpose = "Inject the faults of the failure matrix."
    args = harness.options(purpose, None, full, {"rows": [*ROWS][:2]}, choices)
    results: list[dict[str, Any]] = []
    for name in args.rows:
        for side in args.sides:
            if ROWS[name].scripts and side in ROWS[name].sides:
                outcome = run(ROWS[name], side, args.timeout)
                results.append({"row": name, "side": side, **asdict(outcome)})
                print(name, side, outcome, flush=True)
    harness.finish(args, "failures", results)


if __name__ == "__main__":
    from matrix import main  # ranks import `play` from a module

    harness.start(main)
