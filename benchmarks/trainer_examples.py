"""The examples with trainers and with DeepSpeed's engine: under DDP, under full_shard, and killed.

    python -m benchmarks.trainer_examples [--names bert ...]

Needs the extra `trainers`. Three runs train to the end. The killed one saves every tenth of its
steps; some steps after the middle, its rank 1 gets SIGKILL, and the same command starts again.
Losses are compared on both ranks, bit for bit. Memory is measured as in examples.py, and a
benchmark that was stopped continues likewise. Short runs under DDP and full_shard take turns
then; a step's time is the least of the runs' medians, as other programs only add to it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.examples import (
    ENVIRONMENT,
    Numbers,
    command_of,
    conditions,
    differs_at,
    result_table,
    run,
    same,
    table,
)
from benchmarks.examples import compare as compare_sides
from benchmarks.harness import RESULTS, ROOT

KILLED_AFTER = {  # a step that the example prints; lora's second training begins after 100
    "bert": 90,
    "bert_lightning": 90,
    "resnet_lightning": 72,
    "lora": 160,
    "gpt_deepspeed": 180,
}
TURNS, SHORT = 3, 16  # runs for a step's time, and their steps
DELAY = 3.0  # seconds from then to the kill: the save of that step has ended


def killed(name: str, answer: Path, saved: Path) -> Numbers:
    """Kill a run, start it again, unless it was, and return what it writes as JSON."""
    flags = ["--save", str(saved), "--resume", str(saved)]
    if not answer.exists():
        shutil.rmtree(saved, ignore_errors=True)
        command = command_of(name, "full_shard", flags, answer)
        with subprocess.Popen(
            command, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, text=True
        ) as launcher:
            assert launcher.stdout is not None
            for line in launcher.stdout:
                if line.startswith("step") and f" {KILLED_AFTER[name]}/" in line:
                    time.sleep(DELAY)
                    os.kill(pid_of_rank(1, launcher.pid), signal.SIGKILL)
                    break
            launcher.stdout.read()
        if launcher.returncode == 0 or answer.exists():
            raise SystemExit(f"{name} was not killed")
    return run(name, "full_shard", flags, answer)


def step_times(name: str, runs: dict[str, Numbers], folder: Path) -> dict[str, float]:
    """Milliseconds of a step by strategy."""
    found = {strategy: [runs[strategy]["step_ms"]] for strategy in ("full_shard", "ddp")}
    for turn in range(TURNS):
        for strategy, times in found.items():
            answer = folder / f"{name}-{strategy}-{turn}.json"
            times.append(run(name, strategy, ["--stop-after", str(SHORT)], answer)["step_ms"])
    return {strategy: min(times) for strategy, times in found.items()}


def pid_of_rank(rank: int, launcher: int) -> int:
    """The process of a rank, a child of torchrun's."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for pid in children:
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return int(pid)
    raise ProcessLookupError(f"torchrun (pid {launcher}) has no child of rank {rank}")


def resumption(again: Numbers, whole: Numbers) -> Numbers:
    """What the resumed run made of the losses and the result, beside the undisturbed run.

    Of the last training, as lora.py has two.
    """
    first, steps = again["first"], again["steps"]
    ours, theirs = (
        {"losses": [losses[first - steps :] for losses in each["losses"]]}
        for each in (again, whole)
    )
    at = differs_at(ours, theirs)
    return {
        "resumed_from": first,
        "steps": steps,
        "differs_at": at and at + first,
        "value": again["value"],
        "whole": whole["value"],
    }


def compare(name: str, runs: dict[str, Numbers], times: dict[str, float]) -> Numbers:
    """What the page says of an example, of its three runs and the times of steps."""
    sides = {side: {**runs[side], "step_ms": time} for side, time in times.items()}
    again = resumption(runs["killed"], runs["full_shard"])
    return {**compare_sides(name, sides), "again": again}


def side_table(results: list[Numbers]) -> str:
    """Losses, memory, time, and what a kill changed."""
    header = ["example", "losses", "peak MiB: DDP", "`full_shard`", "ms per step: DDP"]
    header += ["`full_shard`", "killed, resumed from", "losses then", "result, undisturbed"]
    rows = []
    for each in results:
        ours, ddp, again = each["sides"]["full_shard"], each["sides"]["ddp"], each["again"]
        at = again["differs_at"]
        row = [f"`{each['example']}`", same(ours)]
        row += [f"{side['peak_mib']:.0f}" for side in (ddp, ours)]
        row += [f"{side['step_ms']:.0f}" for side in (ddp, ours)]
        row += [f"step {again['resumed_from']} of {again['steps']}"]
        row += ["same" if at is None else f"differ from step {at}"]
        is_same = again["value"] == again["whole"]
        row += ["same" if is_same else f"{again['value']:.3f}, {again['whole']:.3f}"]
        rows.append(row)
    return table(header, rows)


def page(results: list[Numbers], machine: dict[str, Any]) -> str:
    """The results as Markdown."""
    return f"""# The examples with trainers and DeepSpeed's engine ({machine["date"][:10]})

{conditions("trainer_examples", machine)}

{result_table(results)}

"same" means: on both ranks, in all steps, to the last bit. Memory is PSS without mapped files,
above what the rank used before its model was made. A step's time is the least of the
medians of a whole run and of {TURNS} runs of {SHORT} steps; DDP and `full_shard` took turns.

{side_table(results)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", nargs="+", choices=KILLED_AFTER, default=list(KILLED_AFTER))
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "examples", metavar="DIR")
    parser.add_argument("--out", type=Path, help="the file to write (.md; beside it, .json)")
    args = parser.parse_args()
    machine = harness.machine()
    out = args.out or RESULTS / f"{machine['date'][:10]}-trainer-examples.md"
    results = []
    for name in args.names:
        folder = args.runs / "full"
        runs = {
            strategy: run(name, strategy, [], folder / f"{name}-{strategy}.json")
            for strategy in ("full_shard", "ddp")
        }
        answer, saved = folder / f"{name}-killed.json", args.runs / "saved" / name
        runs["killed"] = killed(name, answer, saved)
        results.append(compare(name, runs, step_times(name, runs, folder)))
        record = {"benchmark": "trainer-examples", "machine": machine, "results": results}
        harness.write_json(out.with_suffix(".json"), record)
        out.write_text(page(results, machine))
    print(page(results, machine))


if __name__ == "__main__":
    main()
