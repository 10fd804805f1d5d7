"""Runs whose ranks are killed: duration of a restart, and equality of results.

    nice -n -10 python tests/acceptance/kills.py --case recovery --model demo --kills 20
    python tests/acceptance/kills.py --case soak --minutes 60 --seed 7

recovery: from kill -9 of a random rank of `zshard run --keep`, at a random time, to the end of the next
completed step, on the slowest rank; the last row leaves out torch's import and the construction of the
model.
soak: rounds of training with random faults (kills_rounds.py). Fails if a round's losses or weights
differ from those without faults, if the run ends or stalls, or if memory, descriptors or
threads of a process grow. --seed and --first reproduce a round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from kills_rank import MODELS  # noqa: E402
from kills_rounds import vitals  # noqa: E402

from benchmarks import harness  # noqa: E402

STILL = 120.0
"""Seconds without a new step or round after which a run counts as hung."""

STAGES = ("start", "python", "torch", "imports", "group", "model", "wrapped", "recovered", "end")
"""Stages that kills_rank.py reports when done: from the agent's new process to the first step."""
SCRIPTS_OWN = ("torch", "model")

LIMITS = {"private": 8.0, "shared": 4.0, "descriptors": 4, "threads": 2}
"""By how much the least of a process's last quarter may exceed that of its second: MiB and numbers.
Caches fill in the first quarter; the launcher and the keeper are also sampled within rounds."""

LEAST = 24
"""Looks at a process, without which it has lived too briefly to tell."""

# The second: a store for each restart. In a shared one, init_process_group() of torch 2.13 finds
# addresses of the processes before, and fails or waits.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Run:
    """A run of kills_rank.py, and what its ranks write."""

    def __init__(self, folder: Path, ranks: int, task: Mapping[str, Any]) -> None:
        self.folder, self.ranks = folder, ranks
        launcher = ["zshard", "run", "--bind=none", "--keep", "--standalone"]
        launcher += ["--max-restarts=100000", f"--nproc-per-node={ranks}"]
        script = str(Path(__file__).with_name("kills_rank.py"))
        self.others: dict[str, list[dict[str, Any]]] = {}  # of the launcher and the keeper
        with (folder / "output").open("w") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    *launcher,
                    script,
                    json.dumps({"folder": str(folder), **task}),
                ],
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT},
                stdout=output,
                stderr=output,
            )

    def output_end(self) -> str:
        return "\n".join((self.folder / "output").read_text().splitlines()[-60:])

    def log(self, rank: int) -> list[list[Any]]:
        path = self.folder / f"{rank}.log"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    # --- recovery -----------------------------------------------------------------------------

    def processes(self, rank: int) -> list[dict[str, Any]]:
        """Return, of each process of a rank, its id and when it first did what."""
        processes: list[dict[str, Any]] = []
        for at, what, number in self.log(rank):
            if what == "start":
                processes.append({"pid": number})
            processes[-1].setdefault(what, at)
        return processes

    def wait_for_a_step(self, restarts: int) -> None:
        """Wait until all ranks have trained a step after so many restarts."""
        deadline = time.monotonic() + STILL
        ranks = range(self.ranks)
        while not all("end" in run for r in ranks for run in self.processes(r)[restarts:] or [()]):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(self.output_end())
            time.sleep(0.01)

    def kill(self, rank: int) -> float:
        """Kill a rank's present process and return when."""
        pid, now = self.processes(rank)[-1]["pid"], time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return now

    # --- soak ---------------------------------------------------------------------------------

    def watch(self) -> str:
        """Wait for the end; return what went wrong, "" if nothing."""
        wrong, mark = self.folder / "wrong", self.folder / "round"
        while self.process.poll() is None:
            time.sleep(0.5)
            self.look_at_others()
            if wrong.exists():
                return f"{wrong.read_text()}\n{self.output_end()}"
            if time.time() - (mark if mark.exists() else self.folder).stat().st_mtime > STILL:
                return f"no round has ended for {STILL:g} s:\n{self.output_end()}"
        status = self.process.returncode
        return f"the run ended with {status}:\n{self.output_end()}" if status else ""

    def look_at_others(self) -> None:
        """Count the resources of the launcher, and of the keeper, whose process the launcher
        prints."""
        keeper = re.search(r"process (\d+) keeps", (self.folder / "output").read_text())
        pids = {"launcher": self.process.pid, **({"keeper": int(keeper[1])} if keeper else {})}
        for name, pid in pids.items():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, KeyError):
                self.others.setdefault(name, []).append({"at": time.monotonic(), **vitals(pid)})

    def series(self) -> dict[str, list[dict[str, Any]]]:
        """Return each process's resources: ranks between rounds."""
        series: dict[str, list[dict[str, Any]]] = {}
        for rank in range(self.ranks):
            for at, _, look in filter(lambda line: line[1] == "round", self.log(rank)):
                series.setdefault(f"rank {rank}, pid {look['pid']}", []).append({"at": at, **look})
        return {**series, **self.others}


@contextlib.contextmanager
def running(ranks: int, **options: Any) -> Iterator[Run]:
    """Context manager: a run, which is ended if it is not over."""
    with tempfile.TemporaryDirectory(prefix="zshard-kills-") as folder:
        run = Run(Path(folder), ranks, options)
        try:
            yield run
        finally:
            if run.process.poll() is None:
                run.process.terminate()
            run.process.wait()


# --- recovery -------------------------------------------------------------------------------------


def recovery(args: argparse.Namespace) -> dict[str, Any]:
    draw, kills = random.Random(args.seed), []
    with running(args.ranks, model=args.model, steps=10**9) as run:
        for number in range(args.kills):
            run.wait_for_a_step(number)
            time.sleep(draw.uniform(0, 2))
            kills.append(run.kill(draw.randrange(args.ranks)))
        run.wait_for_a_step(args.kills)
        each = [run.processes(rank) for rank in range(args.ranks)]
    recoveries = [stages(at, [one[i + 1] for one in each]) for i, at in enumerate(kills)]
    spreads = {s: {"seconds": harness.spread([r[s] for r in recoveries])} for s in recoveries[0]}
    harness.show(f"{args.model}, {args.ranks} ranks, {len(kills)} kills", spreads)
    return {"model": args.model, "ranks": args.ranks, "kills": recoveries}


def stages(at: float, processes: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of a recovery's stages, in order, from a kill and the processes after it."""
    ends = [max(process[stage] for process in processes) for stage in STAGES]
    parts = {s: b - a for s, a, b in zip(STAGES, [at, *ends], ends, strict=False)}
    everything = ends[-1] - at
    own = sum(parts[stage] for stage in SCRIPTS_OWN)
    return {**parts, "all": everything, "without the script's own": everything - own}


# --- soak -----------------------------------------------------------------------------------------


def grown(looks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the resources that have grown by more than their limits, and by how much."""
    n = len(looks)
    growth = {}
    for name, limit in LIMITS.items() if n >= LEAST else ():
        values = [look[name] for look in looks]
        more = min(values[-(n // 4) :]) - min(values[n // 4 : n // 2])
        if more > limit:
            growth[name] = more
    return growth


def soak(args: argparse.Namespace) -> dict[str, Any]:
    options = {name: getattr(args, name) for name in ("seed", "first", "rounds", "life")}
    with running(2, until=time.time() + 60 * args.minutes, **options) as run:
        wrong, series = run.watch(), run.series()
    growth = {name: more for name, looks in series.items() if (more := grown(looks))}
    rounds = {look["round"] for looks in series.values() for look in looks if "round" in look}
    restarts = max(0, sum(name.startswith("rank 0") for name in series) - 1)
    judged = [name for name, looks in series.items() if len(looks) >= LEAST]
    print(f"{len(rounds)} rounds, {restarts} restarts; judged: {', '.join(judged) or 'none'}")
    print(f"grows: {growth or 'nothing'}\n{wrong}", flush=True)
    counts = {"wrong": wrong, "growth": growth, "rounds": len(rounds), "restarts": restarts}
    return {**counts, "judged": judged, "series": series}


CASES = {"recovery": recovery, "soak": soak}
FULL = {"case": "recovery", "ranks": 2, "model": "demo", "kills": 20, "seed": 1}
FULL |= {"minutes": 3.0, "first": 0, "rounds": 10**9, "life": 60}
"""--first: round of a soak; --life: its rounds from kill to kill."""


def main() -> int:
    choices = {"case": CASES, "model": MODELS}
    purpose = "Runs whose ranks are killed."
    args = harness.options(purpose, None, FULL, {"kills": 2, "model": "tiny"}, choices)
    result = CASES[args.case](args)
    harness.finish(args, args.case, [result])
    return int(bool(result.get("wrong") or result.get("growth")))


if __name__ == "__main__":
    harness.start(main)
