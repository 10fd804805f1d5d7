"""A long run with random faults: do results stay the same, and does anything grow?

    python -m benchmarks.soak --minutes 60 --seed 7
    python -m benchmarks.soak --draw benchmarks/results/2026-11-27-soak.json

Rounds of training on two ranks, each with a strategy, a transport, an optimizer and faults at
random (soak_rank.py): a rank that is killed or ends by an exception and is restarted by
`python -m zshard run --keep`, exceptions that are caught, nonfinite losses, saves and loads,
evaluations on one rank, models made and dropped. Fails if a round's losses or weights differ from
those of the same round without faults, if the run ends or stands still, or if memory, descriptors
or threads of a process grow. --seed and --first reproduce a round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.soak_rank import vitals

STILL = 120.0
"""Seconds without the end of a round after which the run counts as hung."""

LIMITS = {"private": 8.0, "shared": 4.0, "descriptors": 4, "threads": 2}
"""How much the least of a process's last quarter may exceed that of its second: MiB and numbers.
Caches fill in the first quarter; the launcher and the keeper are looked at within rounds, too."""

LEAST = 24
"""Looks at a process, without which it has lived too briefly to tell."""

Series = dict[str, list[dict[str, Any]]]
"""By process, what was counted when."""


def grown(looks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return what has grown by more than its limit, and by how much."""
    n = len(looks)
    if n < LEAST:
        return {}
    found = {}
    for name, limit in LIMITS.items():
        values = [look[name] for look in looks]
        growth = min(values[-(n // 4) :]) - min(values[n // 4 : n // 2])
        if growth > limit:
            found[name] = growth
    return found


class Soak:
    """A run, and what is known of its processes."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        until = time.time() + 60 * args.minutes
        own = [f"--{name}={getattr(args, name)}" for name in ("seed", "first", "rounds", "life")]
        run = ["zshard", "run", "--bind=none", "--keep", "--max-restarts=100000", "-n", "2"]
        words = [*run, "-m", "benchmarks.soak_rank", *own, f"--until={until}", str(folder)]
        self.said = (folder / "said").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=harness.ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=self.said,
            stderr=self.said,
        )
        self.others: Series = {}

    def wait(self) -> str:
        """Wait for the end; return what went wrong, "" if nothing."""
        while self.process.poll() is None:
            time.sleep(0.5)
            self._look_at_others()
            if (self.folder / "wrong").exists():
                return f"{(self.folder / 'wrong').read_text()}\n{self.last_words()}"
            mark = self.folder / "round"
            if time.time() - (mark if mark.exists() else self.folder).stat().st_mtime > STILL:
                return f"no round has ended for {STILL:g} s:\n{self.last_words()}"
        if self.process.returncode != 0:
            return f"the run ended with {self.process.returncode}:\n{self.last_words()}"
        return ""

    def _look_at_others(self) -> None:
        """Count what the launcher and the keeper have."""
        pids = {"launcher": self.process.pid, **self._keeper()}
        for name, pid in pids.items():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, KeyError):
                look = {"at": time.time(), "pid": pid, **vitals(pid)}
                self.others.setdefault(name, []).append(look)

    def _keeper(self) -> dict[str, int]:
        """Return the keeper's process, which the launcher prints."""
        if "keeper" in self.others:
            return {"keeper": self.others["keeper"][-1]["pid"]}
        found = re.search(r"process (\d+) keeps", self.last_words())
        return {"keeper": int(found[1])} if found else {}

    def last_words(self) -> str:
        self.said.flush()
        return "\n".join((self.folder / "said").read_text().splitlines()[-60:])

    def series(self) -> Series:
        """Return all that was counted, of ranks between rounds."""
        found: Series = {}
        for path in sorted(self.folder.glob("rank *.log")):
            for line in path.read_text().splitlines():
                look = json.loads(line)
                found.setdefault(f"{path.stem}, pid {look['pid']}", []).append(look)
        return {**found, **self.others}


@contextlib.contextmanager
def running(args: argparse.Namespace) -> Iterator[Soak]:
    """Context manager: a run, which is ended if it is not over."""
    with tempfile.TemporaryDirectory(prefix="zshard-soak-") as folder:
        soak = Soak(args, Path(folder))
        try:
            yield soak
        finally:
            if soak.process.poll() is None:
                soak.process.terminate()
            soak.process.wait()
            soak.said.close()


def draw(record: Mapping[str, Any], out: Path) -> None:
    """Draw what each process had, over time."""
    import matplotlib  # not needed by a run without a picture
    from matplotlib.figure import Figure

    series: Series = record["series"]
    start = min(looks[0]["at"] for looks in series.values())
    with matplotlib.rc_context(matplotlib.rcParamsDefault):
        figure = Figure(figsize=(9, 7), facecolor="white")
        panels = figure.subplots(len(LIMITS), 1, sharex=True)
        for axes, name in zip(panels, LIMITS, strict=True):
            for process, looks in series.items():
                minutes = [(look["at"] - start) / 60 for look in looks]
                kind = process.partition(",")[0]
                colour = {"rank 0": "C0", "rank 1": "C1", "launcher": "0.4"}.get(kind, "C2")
                axes.plot(minutes, [look[name] for look in looks], color=colour, linewidth=1)
            axes.set_ylabel(f"{name}, MiB" if name in ("private", "shared") else name, fontsize=8)
            axes.set_ylim(bottom=0)
        panels[-1].set_xlabel("minutes")
        words = (
            "ranks 0 and 1 (blue, orange: a line for each process), launcher (grey), keeper (green)"
        )
        figure.suptitle(
            f"{record['rounds']} rounds, {record['restarts']} restarts\n{words}", fontsize=9
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=110, metadata={"Software": None})


def result_of(soak: Soak, wrong: str) -> dict[str, Any]:
    series = soak.series()
    growth = {name: found for name, looks in series.items() if (found := grown(looks))}
    rounds = {look["round"] for looks in series.values() for look in looks if "round" in look}
    processes = [name for name in series if name.startswith("rank 0")]
    judged = [name for name, looks in series.items() if len(looks) >= LEAST]
    return {
        "wrong": wrong,
        "growth": growth,
        "rounds": len(rounds),
        "restarts": max(0, len(processes) - 1),
        "judged": judged,
        "series": series,
    }


def main() -> int:
    parser = harness.parser("Training with random faults: wrong results, and growth.")
    parser.add_argument("--minutes", type=float, default=3, help="how long (default: 3)")
    parser.add_argument("--seed", type=int, default=1, help="of strategies and faults")
    parser.add_argument("--first", type=int, default=0, help="the first round")
    parser.add_argument("--rounds", type=int, default=10**9, help="how many, at most")
    parser.add_argument("--life", type=int, default=60, help="rounds from kill to kill")
    parser.add_argument("--draw", type=Path, help="draw a PNG beside this JSON file; no run")
    args = parser.parse_args()
    if args.draw:
        draw(json.loads(args.draw.read_text())["results"][0], args.draw.with_suffix(".png"))
        return 0
    with running(args) as soak:
        record = result_of(soak, soak.wait())
    print(f"{record['rounds']} rounds, {record['restarts']} restarts", flush=True)
    print(f"judged: {', '.join(record['judged']) or 'no process lived long enough'}")
    for name, found in record["growth"].items():
        print(f"{name} grows: {found}")
    if record["wrong"]:
        print(record["wrong"], file=sys.stderr)
    harness.finish(args, "soak", [record])
    return 1 if record["wrong"] or record["growth"] else 0


if __name__ == "__main__":
    harness.start(main)
