"""From kill -9 of a rank to the end of the next completed step: kept runs, and runs from a disk.

    nice -n -10 python -m benchmarks.recovery_time --model demo --kills 20

    kept    zshard.Keep, `python -m zshard run --keep`
    zshard  torchrun, zshard.save every --every steps, zshard.load
    fsdp2   torchrun, fully_shard over gloo, torch.distributed.checkpoint, likewise

Each run is killed --kills times: a random rank, at a random time within a random step of the next
--every. Losses of all steps are compared with those of a run that nothing disturbed, to the
bit. A time is that of the slowest rank. `recovered in` leaves out torch's import and the
construction of the model; `caught up in` ends when the step that the kill cut off is done, which
counts steps that are lost. With --cost: step time with and without --keep, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.recovery_rank import MODELS, SIDES, TURN

LIMIT = 120.0
"""Seconds without a new step after which a run counts as lost."""

STAGES = {
    "noticed": "the agent notices",
    "start": "it ends the ranks and starts new ones",
    "python": "Python starts",
    "torch": "import torch",
    "imports": "other imports",
    "group": "init_process_group()",
    "model": "the model is built",
    "wrapped": "FSDP() or fully_shard()",
    "recovered": "recover() or load()",
    "end": "the first step",
}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""The second: a store for each restart. In a shared one, init_process_group() of torch 2.13 finds
addresses of the processes before, and fails or waits."""

SCRIPTS_OWN = ("torch", "model")


class Job:
    """A run of recovery_rank.py, and what its ranks write."""

    def __init__(
        self, args: argparse.Namespace, side: str, steps: int, folder: Path, **how: Any
    ) -> None:
        how = {"every": 0, "kept": side == "kept", "lock": None, **how}
        self.folder, self.ranks = folder, args.ranks
        self.said: list[tuple[float, str]] = []
        launcher = ["zshard", "run", "--bind=none", "--keep"] if how["kept"] else []
        own = [f"--side={side}", f"--model={args.model}", f"--steps={steps}"]
        own += [f"--every={how['every']}", *([f"--lock={how['lock']}"] if how["lock"] else [])]
        words = [*(launcher or ["torch.distributed.run"]), "--standalone", "--max-restarts=1000"]
        words += [f"--nproc-per-node={args.ranks}", "-m", "benchmarks.recovery_rank", *own]
        self.process = subprocess.Popen(
            [sys.executable, "-m", *words, str(folder)],
            cwd=harness.ROOT,
            env={**os.environ, **ENVIRONMENT},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append((time.monotonic(), line))

    def log(self, rank: int) -> list[list[Any]]:
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / f"{rank}.log").read_text().split("\n")[:-1]
            return [json.loads(line) for line in lines]
        return []

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Raises RuntimeError with what the run said if it ends before, or after LIMIT."""
        deadline = time.monotonic() + LIMIT
        while not done():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("".join(line for _, line in self.said[-40:]))
            time.sleep(0.002)

    def begun(self, step: int, restarts: int) -> bool:
        """Return whether all ranks, after so many restarts and another step, have begun a step or a
        later one."""
        runs = [generations_of(self.log(rank)) for rank in range(self.ranks)]
        return all(
            len(run) > restarts and run[-1]["ends"] and run[-1]["begun"] >= step for run in runs
        )

    def kill(self, rank: int) -> float:
        """Kill a rank's present process and return when."""
        pid = [number for _, what, number in self.log(rank) if what == "start"][-1]
        now = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return now


@contextlib.contextmanager
def running(args: argparse.Namespace, side: str, steps: int, **how: Any) -> Iterator[Job]:
    """Context manager: a job, which is ended if it is not over."""
    with tempfile.TemporaryDirectory(prefix="zshard-bench-") as folder:
        job = Job(args, side, steps, Path(folder), **how)
        try:
            yield job
        finally:
            if job.process.poll() is None:
                job.process.terminate()
            job.process.wait()


def undisturbed(args: argparse.Namespace, side: str, steps: int) -> list[dict[int, str]]:
    """Return each rank's losses without a kill, a keeper or a save."""
    with running(args, "zshard" if side == "kept" else side, steps) as job:
        if job.process.wait() != 0:
            raise RuntimeError("".join(line for _, line in job.said))
        logs = [job.log(rank) for rank in range(args.ranks)]
        return [dict(line[2] for line in log if line[1] == "end") for log in logs]


def measured(args: argparse.Namespace, side: str) -> dict[str, Any]:
    """Kill a run as often as is asked, and return what its recoveries took and lost."""
    draw = random.Random(args.seed)
    targets = [1]
    while len(targets) < args.kills:
        targets.append(targets[-1] + 2 + draw.randrange(args.every - 1))
    steps = targets[-1] + 4
    expected = undisturbed(args, side, steps)
    kills: list[float] = []
    with running(args, side, steps, every=args.every) as job:
        try:
            for target in targets:
                job.wait_until(functools.partial(job.begun, target, len(kills)))
                time.sleep(draw.random() * step_seconds(job.log(0)))
                kills.append(job.kill(draw.randrange(args.ranks)))
            job.wait_until(lambda: job.process.poll() == 0)
        except RuntimeError as error:
            print(error, file=sys.stderr)
        job.reader.join(5)
        generations = [generations_of(job.log(rank)) for rank in range(args.ranks)]
        notices = [at for at, line in job.said if "closing signal" in line]
    came_back = min(sum("end" in run["stages"] for run in each[1:]) for each in generations)
    found = [recovery(at, generations, notices, i) for i, at in enumerate(kills[:came_back])]
    wrong = 0
    for after in list(zip(*generations, strict=False))[1 : came_back + 1]:
        pairs = zip(after, expected, strict=True)
        wrong += any(run["losses"].items() - losses.items() for run, losses in pairs)
    counts = {"lost": args.kills - came_back, "wrong": wrong, "same": came_back - wrong}
    return {"side": side, "model": args.model, "ranks": args.ranks, **counts, "kills": found}


def step_seconds(log: list[list[Any]]) -> float:
    """Return the median of a step, which follows its begin at once."""
    ends = [i for i, line in enumerate(log) if line[1] == "end"]
    return statistics.median(log[i][0] - log[i - 2][0] for i in ends)


def generations_of(log: list[list[Any]]) -> list[dict[str, Any]]:
    """Return, of each process, when each stage ended, and its steps' ends and losses."""
    found: list[dict[str, Any]] = []
    for at, what, number in log:
        if what == "start":
            found.append({"stages": {}, "ends": {}, "losses": {}, "begun": -1})
        if what == "end":
            found[-1]["ends"][number[0]] = at
            found[-1]["losses"][number[0]] = number[1]
        if what == "begin":
            found[-1]["begun"] = number
        found[-1]["stages"].setdefault(what, at)
        if what == "recovered":
            found[-1]["step"] = number
    return found


def recovery(
    at: float, generations: Sequence[Sequence[Any]], notices: Sequence[float], i: int
) -> dict[str, Any]:
    """Return the seconds of recovery i's stages, in order, and what it lost."""
    before, after = [each[i] for each in generations], [each[i + 1] for each in generations]
    ends = {stage: max(each["stages"][stage] for each in after) for stage in [*STAGES][1:]}
    ends["noticed"] = min((time for time in notices if time > at), default=at)
    last, stages = at, {}
    for stage in STAGES:
        stages[stage], last = ends[stage] - last, ends[stage]
    done = min(max([each["step"] - 1, *each["ends"]]) for each in before)
    cut_off = max(done + 1, after[0]["step"])
    caught_up = max(each["ends"].get(cut_off, last) for each in after)
    own = sum(stages[stage] for stage in SCRIPTS_OWN)
    return {
        "stages": stages,
        "all": last - at,
        "recovered": last - at - own,
        "caught_up": caught_up - at - own,
        "lost_steps": max(0, done + 1 - after[0]["step"]),
    }


def cost(args: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of a step with --keep and without, of two jobs that take turns."""
    steps = args.rounds * TURN
    with tempfile.NamedTemporaryFile() as lock, contextlib.ExitStack() as jobs:
        sides = {"plain": "zshard", "kept": "kept"}
        logs: dict[str, Any] = {}
        for name, side in sides.items():
            logs[name] = jobs.enter_context(running(args, side, steps, lock=lock.name))
        for name, job in list(logs.items()):
            if job.process.wait() != 0:
                raise RuntimeError("".join(line for _, line in job.said))
            logs[name] = job.log(0)
    return {"model": args.model, "ranks": args.ranks, **{k: parts(v) for k, v in logs.items()}}


def parts(log: list[list[Any]]) -> dict[str, Any]:
    """Return min/median/max of a whole step and of the optimizer's part, without the first step of
    each turn and the first turns."""
    at = {(what, n[0] if what == "end" else n): time for time, what, n in log}
    steps = [n for what, n in at if what == "end" and n % TURN and n > 2 * TURN]
    return {
        name: harness.Spread.of([1e3 * (at["end", n] - at[begin, n]) for n in steps]).as_dict()
        for name, begin in (("step_ms", "begin"), ("optimizer_ms", "backward"))
    }


def show(result: dict[str, Any]) -> None:
    if "kills" not in result:
        print(json.dumps(result, indent=1))
        return
    kills = result["kills"]

    def middle(values: list[float]) -> str:
        return f"{statistics.median(values):.2f}" if values else "-"

    rows = [[f"kills: {name}", str(result[name])] for name in ("same", "wrong", "lost")]
    rows += [[STAGES[s], middle([kill["stages"][s] for kill in kills])] for s in STAGES]
    for name in ("all", "recovered", "caught_up", "lost_steps"):
        rows.append([name, middle([kill[name] for kill in kills])])
    title = f"{result['side']}, {result['model']}, {result['ranks']} ranks: medians, seconds"
    harness.print_table(title, ["", ""], rows)


def main() -> None:
    parser = harness.parser("Time from kill -9 of a rank to the next completed step.", ranks=2)
    parser.add_argument("--model", choices=MODELS, default="demo")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES])
    parser.add_argument("--kills", type=int, default=20, help="of each side")
    parser.add_argument("--every", type=int, default=10, help="steps from save to save, >= 2")
    parser.add_argument("--cost", action="store_true", help="step time with and without --keep")
    parser.add_argument("--rounds", type=int, default=40, help="turns of each job, for --cost")
    parser.add_argument("--seed", type=int, default=1, help="of the kills")
    args = parser.parse_args()
    if args.quick:
        args.kills, args.every, args.rounds = 2, 3, 4
    results = []
    for side in [None] if args.cost else args.sides:
        results.append(cost(args) if side is None else measured(args, side))
        show(results[-1])
    harness.finish(args, "recovery-cost" if args.cost else "recovery", results)


if __name__ == "__main__":
    harness.start(main)
