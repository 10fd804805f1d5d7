"""`make demo`: train a GPT sharded over two ranks, then the same first steps under its peers.

    python examples/demo.py            # about five minutes on two cores
    python examples/demo.py --quick    # a tiny model and a few steps, to see that everything runs

Each run is a `torchrun` of train_gpt.py, one after another so that none slows the others; the
numbers come from the run.json that each leaves. What a run writes to stderr goes to a file beside
it, and its end is shown if the run fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

RANKS = 2
LIBRARIES = ("zshard", "ddp", "fsdp2")
TRAIN = Path(__file__).with_name("train_gpt.py")
ERROR_LINES = 40
STOP_SECONDS = 15.0


class Plan(NamedTuple):
    """What to run: train_gpt.py's flags for all runs, and how many steps of which."""

    flags: tuple[str, ...]
    steps: int
    compared_steps: int
    sample: int


FULL = Plan(
    ("--size", "10m", "--batch", "4", "--lr", "2e-3"),
    steps=400,
    compared_steps=40,
    sample=300,
)
QUICK = Plan(  # unclipped, so that no bit differs: the norm of shards is summed in another order
    ("--size", "tiny", "--batch", "2", "--warmup", "2", "--eval-sequences", "3", "--clip", "0"),
    steps=8,
    compared_steps=5,
    sample=16,
)


class RunFailed(RuntimeError):
    """A training run ended with an error; the message holds the end of its stderr."""


def run(plan: Plan, library: str, out: Path, stop_after: int, sample: int) -> dict[str, Any]:
    """Train with `library` until step `stop_after`; returns what run.json says.

    Raises RunFailed if torchrun does not end well; no process of it is left in any case.
    """
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), str(TRAIN), "--library", library, *plan.flags]
    command += ["--steps", str(plan.steps), "--stop-after", str(stop_after)]
    command += ["--sample", str(sample), "--out", str(out)]
    errors = out / "stderr.log"
    with errors.open("wb") as stderr:
        # A session of its own: Ctrl-C reaches this process alone, which then ends the ranks.
        child = subprocess.Popen(command, stderr=stderr, env=environment(), start_new_session=True)
        try:
            status = child.wait()
        finally:
            stop(child)
    if status != 0:
        tail = last_words(errors.read_text(errors="replace"))
        raise RunFailed(
            "\n".join([f"{library} failed with status {status}; {errors} ends:", *tail])
        )
    numbers: dict[str, Any] = json.loads((out / "run.json").read_text())
    return numbers


def last_words(errors: str) -> list[str]:
    """The end of what the ranks wrote; torchrun's own report if they wrote nothing before it."""
    lines = errors.splitlines()
    report = (at for at, line in enumerate(lines) if "elastic/multiprocessing/api.py" in line)
    return (lines[: next(report, None)] or lines)[-ERROR_LINES:]


def environment() -> dict[str, str]:
    """One thread a rank unless the caller says otherwise: two ranks then fill two cores."""
    return {"OMP_NUM_THREADS": "1", **os.environ}


def stop(child: subprocess.Popen[bytes]) -> None:
    """End torchrun if it still runs: it ends its ranks on SIGTERM; what then lives is killed."""
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
    """Pids of the process's children and theirs, deepest first (none where /proc does not tell)."""
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, listing.read_text().split()):
            yield from descendants(child)
            yield child


def demo(plan: Plan, libraries: list[str], out: Path) -> None:
    """The long run with the first library, the short ones with all, and the table."""
    began = time.monotonic()
    first, *_ = libraries
    heading(f"{first}: {plan.steps} steps on {RANKS} ranks")
    long = run(plan, first, out / "long", plan.steps, plan.sample)
    short = {}
    for library in libraries:
        heading(f"{library}: the first {plan.compared_steps} of these steps, to compare")
        short[library] = run(plan, library, out / library, plan.compared_steps, 0)
    heading(
        f"the first {plan.compared_steps} steps, {RANKS} ranks, {long['parameters']:,} parameters"
    )
    show_table(COLUMNS, [row(numbers, short) for numbers in short.values()])
    if plan is FULL and len(short) > 1:
        print(
            "The norm that clips gradients is summed shard by shard, in another order than DDP's: "
            "its last bit is what\nlosses differ by. Without clipping (--quick) no bit differs."
        )
    print(
        f"\n{first} after all {plan.steps} steps: held-out loss {long['held_out'][-1][1]:.3f}, "
        f"{long['tokens_per_second']:,.0f} tokens/s\n"
        f"loss curve {out / 'long' / 'loss.png'}, numbers {out / 'long' / 'run.json'}\n"
        f"The short runs stand for themselves, one each: `make bench` measures with care.\n"
        f"{time.monotonic() - began:.0f} s in all"
    )


COLUMNS = (
    "library",
    "strategy",
    "held-out loss",
    "largest loss difference",
    "tokens/s",
    "peak MiB a rank",
)


def row(numbers: dict[str, Any], runs: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    """One line of the table; the loss difference is to DDP over all steps, if DDP ran."""
    difference = "-"
    if "ddp" in runs:
        pairs = zip(numbers["loss"], runs["ddp"]["loss"], strict=True)
        difference = f"{max(abs(one - other) for one, other in pairs):.1g}"
    return (
        numbers["config"]["library"],
        numbers["config"]["strategy"],
        f"{numbers['held_out'][-1][1]:.4f}",
        difference,
        f"{numbers['tokens_per_second']:,.0f}",
        f"{max(numbers['peak_memory_mib']):,.0f} ({numbers['memory_kind']})",
    )


def heading(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def show_table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Print a table, by rich if it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain_table(columns, rows))
        return
    table = Table()
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < 2 else "right")
    for cells in rows:
        table.add_row(*cells)
    Console().print(table)


def plain_table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = [columns, tuple("-" * width for width in widths), *rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model and a few steps")
    parser.add_argument(
        "--libraries",
        nargs="+",
        choices=(*LIBRARIES, "fsdp1"),
        default=list(LIBRARIES),
        help="which to compare; the first one makes the long run",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), help="folder for the results"
    )
    return parser.parse_args()


def main() -> int:
    """Exit status: 0, 1 if a run failed, 130 after Ctrl-C, 143 after SIGTERM."""
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` ends the ranks
    try:
        demo(QUICK if args.quick else FULL, args.libraries, args.out)
    except RunFailed as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
