"""`make demo`: train a GPT with zshard on two ranks, then compare its start with DDP and FSDP2.

    python examples/demo.py            # two and a half minutes on two cores
    python examples/demo.py --long     # a larger model and 400 steps
    python examples/demo.py --quick    # a tiny model and a few steps: does everything run?

zshard's run is measured once. At step `compared_steps` it records the values for the comparison
with the others, which stop there: same seed, data, learning-rate schedule and number of ranks. Each
run is a `torchrun` of train_gpt.py, one after another, and leaves a run.json. Its stderr goes to a
file next to that; the end of it is shown if the run fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from measure import save_comparison

RANKS = 2
LIBRARIES = ("zshard", "ddp", "fsdp2")
TRAIN = Path(__file__).with_name("train_gpt.py")
ERROR_LINES = 40
STOP_SECONDS = 15.0


class Plan(NamedTuple):
    """A demo: train_gpt.py's flags for all runs, the steps, and the loss to reach."""

    flags: tuple[str, ...]
    steps: int
    compared_steps: int
    sample: int
    goal: float


NORMAL = Plan(
    (*("--size", "5m", "--batch", "4", "--lr", "3e-3"), *("--eval-every", "40")),
    steps=200,
    compared_steps=40,
    sample=0,
    goal=2.1,  # 1.96 with Python 3.11's library
)
LONG = Plan(
    ("--size", "10m", "--batch", "4", "--lr", "2e-3"),
    steps=400,
    compared_steps=40,
    sample=300,
    goal=2.1,
)
QUICK = Plan(  # no clipping, so that losses are bit-identical: see NOTE_ON_CLIPPING
    ("--size", "tiny", "--batch", "2", "--warmup", "2", "--eval-sequences", "3", "--clip", "0"),
    steps=8,
    compared_steps=5,
    sample=16,
    goal=5.4,
)
NOTE_ON_CLIPPING = (
    "Losses differ in the last bits because each library rounds the gradient norm for clipping\n"
    "in its own way (docs/training.md). Without clipping (--quick) they are bit-identical."
)


class RunFailed(RuntimeError):
    """A training run failed; the message holds the end of its stderr."""


def run(plan: Plan, library: str, out: Path, *, main_run: bool) -> dict[str, Any]:
    """Train with `library`, to the end of the schedule or to the compared step; return run.json.

    Raises RunFailed if torchrun fails. No process of the run survives this call.
    """
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), str(TRAIN), "--library", library, *plan.flags]
    command += ["--steps", str(plan.steps), "--compare-at", str(plan.compared_steps)]
    command += ["--sample", str(plan.sample if main_run else 0), "--out", str(out)]
    command += [] if main_run else ["--brief", "--stop-after", str(plan.compared_steps)]
    errors = out / "stderr.log"
    with errors.open("wb") as stderr:
        # Its own session: Ctrl-C reaches this process alone, which then ends the ranks.
        child = subprocess.Popen(command, stderr=stderr, env=environment(), start_new_session=True)
        try:
            status = child.wait()
        finally:
            stop(child)
    if status != 0:
        tail = last_words(errors.read_text(errors="replace"))
        raise RunFailed(
            "\n".join([f"{library} failed with exit status {status}; end of {errors}:", *tail])
        )
    numbers: dict[str, Any] = json.loads((out / "run.json").read_text())
    return numbers


def last_words(errors: str) -> list[str]:
    """The end of the ranks' stderr; torchrun's own report if they wrote nothing before it."""
    lines = errors.splitlines()
    report = (at for at, line in enumerate(lines) if "elastic/multiprocessing/api.py" in line)
    return (lines[: next(report, None)] or lines)[-ERROR_LINES:]


def environment() -> dict[str, str]:
    """One thread per rank unless OMP_NUM_THREADS is set: two ranks then fill two cores."""
    return {"OMP_NUM_THREADS": "1", **os.environ}


def stop(child: subprocess.Popen[bytes]) -> None:
    """Terminate torchrun if it still runs, and with it its ranks; kill what survives SIGTERM."""
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        for pid in [*descendants(child.pid), child.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        child.wait()


def descendants(pid: int) -> Iterable[int]:
    """Pids of the process's descendants, deepest first (none without Linux's /proc)."""
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, listing.read_text().split()):
            yield from descendants(child)
            yield child


def demo(plan: Plan, libraries: list[str], out: Path) -> bool:
    """Run the libraries, print the comparison and write the plot: did the loss reach the goal?"""
    began = time.monotonic()
    first, *others = libraries
    heading(f"{first}: {plan.steps} steps on {RANKS} ranks")
    runs = {first: run(plan, first, out / first, main_run=True)}
    reached = check(plan, first, runs[first])
    for library in others:
        heading(f"{library}: the first {plan.compared_steps} of these steps")
        runs[library] = run(plan, library, out / library, main_run=False)
    steps, measured = plan.compared_steps, runs[first]["compared"]["measured_steps"]
    heading(
        f"after {steps} steps: {RANKS} ranks, {runs[first]['parameters']:,} parameters, "
        f"tokens/s from the median of the last {measured} steps"
    )
    print(table(COLUMNS, [row(numbers, runs) for numbers in runs.values()]))
    if plan is not QUICK and "ddp" in runs and len(runs) > 1:
        print(f"\n{NOTE_ON_CLIPPING}")
    print(
        "\nThese are single runs, one after another: treat differences of a few percent as noise.\n"
        "`make bench` interleaves the libraries and repeats them."
    )
    picture = out / "demo.png"
    print(
        f"plot: {picture}"
        if save_comparison(picture, runs)
        else "no plot: matplotlib is not installed"
    )
    print(f"numbers: {', '.join(str(out / library / 'run.json') for library in runs)}")
    print(f"total: {time.monotonic() - began:.0f} s", flush=True)
    return reached


def check(plan: Plan, library: str, numbers: dict[str, Any]) -> bool:
    """Print whether the held-out loss fell below the plan's goal, and return it."""
    loss = numbers["final"]["held_out"]
    reached = bool(loss < plan.goal)  # False for NaN
    print(
        f"{'PASS' if reached else 'FAIL'}: {library}'s held-out loss is {loss:.3f} nats per byte "
        f"after {plan.steps} steps; expected: below {plan.goal} (uniform "
        f"guessing: {math.log(256):.2f})",
        flush=True,
    )
    return reached


COLUMNS = (
    "library",
    "strategy",
    "held-out loss",
    "max. loss difference from DDP",
    "tokens/s",
    "peak memory per rank",
)


def row(numbers: dict[str, Any], runs: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    """A row of the table; the loss difference is over all compared steps, "-" without DDP."""
    difference, compared = "-", numbers["compared"]
    if "ddp" in runs:
        steps = compared["steps"]
        pairs = zip(numbers["loss"][:steps], runs["ddp"]["loss"][:steps], strict=True)
        difference = f"{max(abs(one - other) for one, other in pairs):.1g}"
    return (
        numbers["config"]["library"],
        numbers["config"]["strategy"],
        f"{compared['held_out']:.4f}",
        difference,
        f"{compared['tokens_per_second']:,.0f}",
        f"{max(compared['peak_memory_mib']):,.0f} MiB ({numbers['memory_kind']})",
    )


def heading(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """An aligned text table: names on the left, numbers on the right."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = [columns, tuple("-" * width for width in widths), *rows]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index > 1 else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help="a tiny model and a few steps")
    length.add_argument("--long", action="store_true", help="a larger model and 400 steps")
    parser.add_argument(
        "--libraries",
        nargs="+",
        choices=(*LIBRARIES, "fsdp1"),
        default=list(LIBRARIES),
        help="what to run; only the first one trains to the end (default: zshard ddp fsdp2)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/demo"),
        help="directory for the results (default: %(default)s)",
    )
    return parser.parse_args()


def main() -> int:
    """Exit status: 0; 1 if a run or the loss check failed; 130 on Ctrl-C, 143 on SIGTERM."""
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` ends the ranks
    try:
        plan = QUICK if args.quick else LONG if args.long else NORMAL
        return 0 if demo(plan, args.libraries, args.out) else 1
    except RunFailed as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
