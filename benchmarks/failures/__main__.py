"""Run the rows of the failure matrix and write their outcomes.

    python -m benchmarks.failures [--rows S1 S2 ...] [--sides zshard] [--timeout 20]

Each script runs on fresh ranks (two, as a rule), forked from a process that has imported torch.
`timeout` is that of gloo's process group, in seconds; torch's default is 30 minutes. A rank that
still runs GRACE seconds after it counts as hanging.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.failures.play import play
from benchmarks.failures.rows import ROWS, SIDES, Outcome, Row, judge

sys.path.insert(0, str(harness.ROOT / "tests" / "lib"))  # forks ranks within milliseconds

GRACE = 12.0


def run(row: Row, side: str, timeout: float) -> Outcome:
    """Run a row's scripts, one after another; return the first outcome that is not correct, or
    that of the last one. A script whose ranks are killed is not judged if another follows."""
    from nursery import fork_ranks

    outcome = Outcome("correct")
    with tempfile.TemporaryDirectory(prefix="zshard-row-") as name:
        folder = Path(name)
        for phase, (_, world) in enumerate(zip(row.scripts, row.worlds, strict=False)):
            for left in (*folder.glob("answer*"), *folder.glob("fault")):
                left.unlink()
            arguments = (row.id, side, name, phase, timeout)
            ended = fork_ranks(play, world, *arguments, timeout=timeout + GRACE)
            outcome = judge(row, folder, ended, timeout)
            victims = [*folder.glob("victim*")]
            if outcome.kind != "correct" and not (victims and phase + 1 < len(row.scripts)):
                break
            for victim in victims:
                victim.unlink()
    return outcome


def main() -> None:
    parser = harness.parser("Inject the faults of the failure matrix.")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS], metavar="ID")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES])
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds, of gloo")
    args = parser.parse_args()
    if args.quick:
        args.rows = args.rows[:2]
    results: list[dict[str, Any]] = []
    for name in args.rows:
        for side in args.sides:
            if ROWS[name].scripts and side in ROWS[name].sides:
                found = run(ROWS[name], side, args.timeout)
                results.append({"row": name, "side": side, **found.as_dict()})
                print(name, side, found, flush=True)
    harness.finish(args, "failures", results)


if __name__ == "__main__":
    harness.start(main)
