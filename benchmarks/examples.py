"""The examples without trainers, under DDP and each strategy: results, losses, memory and time.

    python -m benchmarks.examples [--names resnet ...] [--steps 20 | --whole]

full_shard trains to the end and reaches the result that the example asserts. The others train the
first steps of the same schedule, or with --whole to the end. Losses are compared with DDP's on all
ranks, bit for bit. Memory is PSS without mapped files, sampled 20 times a second, above what the
rank used before its model was made. malloc's mmap threshold is fixed, so freed memory returns to
the kernel. Runs follow one another, so their times are rough. Each leaves a file in runs/examples:
a benchmark that was stopped continues with what is missing there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import RESULTS, ROOT

NAMES = ("resnet", "simclr", "swav", "image_gpt", "deepspeech", "moe", "unet")
STRATEGIES = ("full_shard", "ddp", "shard_grad_op", "no_shard", "hybrid_shard")
STRATEGIES += ("zero1", "hybrid_full", "hybrid_shard_zero2")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}

Numbers = dict[str, Any]


def command_of(name: str, strategy: str, flags: list[str], answer: Path) -> list[str]:
    """The command that runs an example on two ranks, which write to `answer`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(ROOT / "examples" / f"{name}.py")]
    return [*command, "--strategy", strategy, "--json", str(answer), *flags]


def run(name: str, strategy: str, flags: list[str], answer: Path) -> Numbers:
    """Run an example on two ranks, unless it was, and return what it writes as JSON."""
    if not answer.exists():
        answer.parent.mkdir(parents=True, exist_ok=True)
        command = command_of(name, strategy, flags, answer)
        print(" ".join(command[3:]), flush=True)
        # An exit status of 1 may mean a result that is not reached, which is in the file.
        subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=False)
    numbers: Numbers = json.loads(answer.read_text())
    return numbers


def differs_at(ours: Numbers, theirs: Numbers) -> int | None:
    """The first step, counted from 1, whose losses differ on a rank; None if all are equal."""
    pairs = [
        zip(*sides, strict=False) for sides in zip(ours["losses"], theirs["losses"], strict=True)
    ]
    found = [at for rank in pairs for at, (mine, other) in enumerate(rank, 1) if mine != other]
    return min(found, default=None)


def side_of(numbers: Numbers, ddp: Numbers | None) -> dict[str, Any]:
    """One example under one strategy."""
    others = numbers["losses"][0] if ddp is None else ddp["losses"][0]
    return {
        "steps": min(len(numbers["losses"][0]), len(others)),
        "differs_at": None if ddp is None else differs_at(numbers, ddp),
        "peak_mib": numbers["peak_mib"],
        "step_ms": numbers["step_ms"],
    }


def compare(name: str, runs: dict[str, Numbers]) -> Numbers:
    """What the page says of an example, of runs by strategy."""
    kept = ("what", "value", "expected", "baseline", "parameters")
    sides = {strategy: side_of(numbers, runs.get("ddp")) for strategy, numbers in runs.items()}
    return {"example": name, **{key: runs["full_shard"][key] for key in kept}, "sides": sides}


def table(header: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def result_table(results: list[Numbers]) -> str:
    """What each example reached on held-out data."""
    header = ["example", "parameters", "on held-out data", "expected", "`full_shard`"]
    rows = []
    for each in results:
        name, value = each["baseline"]
        rows.append([f"`{each['example']}.py`", f"{each['parameters']:,}"])
        rows[-1] += [each["what"].removeprefix("held-out "), f"{each['expected']}"]
        rows[-1] += [f"{each['value']:.3f}", f"{value:.3f}: {name}"]
    return table([*header, "trivial baseline"], rows)


def side_table(results: list[Numbers]) -> str:
    """Losses, memory and time of each example under each strategy."""
    names = [name for name in STRATEGIES if any(name in each["sides"] for each in results)]
    names.sort(key=lambda name: name != "ddp")  # first
    kinds = {
        "losses": same,
        "peak MiB": lambda side: f"{side['peak_mib']:.0f}",
        "ms per step": lambda side: f"{side['step_ms']:.0f}",
    }
    rows = []
    for each in results:
        label = f"`{each['example']}`"
        for kind, cell in kinds.items():
            sides = [each["sides"].get(name) for name in names]
            rows.append([label, kind, *("-" if side is None else cell(side) for side in sides)])
            label = ""
        rows[-len(kinds)][2] = "-"  # DDP's losses are those of DDP
    return table(["example", "", "DDP", *(f"`{name}`" for name in names[1:])], rows)


def same(side: Numbers) -> str:
    """Whether losses are those of DDP."""
    at = side["differs_at"]
    return f"same, {side['steps']}" if at is None else f"differ from step {at}"


def conditions(module: str, machine: dict[str, Any]) -> str:
    """Where and how a benchmark of examples ran, in a paragraph."""
    return f"""`python -m benchmarks.{module}`: 2 ranks of one thread, torch {machine["torch"]},
{machine["cpu"]}, {machine["cores"]} cores, commit {machine["commit"]}. Other programs used the
machine too (load {machine["load_1min"]:.1f} at the start), so times are rough; losses and memory do
not depend on that."""


def page(results: list[Numbers], machine: dict[str, Any]) -> str:
    """The results as Markdown."""
    return f"""# The examples under DDP and each strategy ({machine["date"][:10]})

{conditions("examples", machine)}

{result_table(results)}

"same, N" means: on both ranks, in N steps, to the last bit. Memory is PSS without mapped
files, above what the rank used before its model was made. A step's time is the median of the run.

{side_table(results)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--steps", type=int, default=20, help="steps of all but full_shard")
    parser.add_argument("--whole", action="store_true", help="train to the end in all runs")
    parser.add_argument("--quick", action="store_true", help="tiny models; write no results")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "examples", metavar="DIR")
    parser.add_argument("--out", type=Path, help="the file to write (.md; beside it, .json)")
    args = parser.parse_args()
    machine = harness.machine()
    out = args.out or (None if args.quick else RESULTS / f"{machine['date'][:10]}-examples.md")
    first = ["--quick"] if args.quick else []
    short = [*first, *([] if args.whole else ["--stop-after", str(args.steps)])]
    runs: dict[str, dict[str, Numbers]] = {name: {} for name in args.names}
    results: list[Numbers] = []
    for strategy in STRATEGIES:
        flags = first if strategy == "full_shard" else short
        for name in args.names:
            answer = args.runs / ("quick" if args.quick else "full") / f"{name}-{strategy}.json"
            runs[name][strategy] = run(name, strategy, flags, answer)
        results = [compare(name, known) for name, known in runs.items()]
        if out:  # after each strategy: the next ones take a while
            record = {"benchmark": "examples", "machine": machine, "results": results}
            harness.write_json(out.with_suffix(".json"), record)
            out.write_text(page(results, machine))
    print(page(results, machine))


if __name__ == "__main__":
    main()
