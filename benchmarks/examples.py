"""The examples without trainers, under DDP and each strategy: results, losses, memory and time.

    python -m benchmarks.examples [--names resnet ...] [--steps 20 | --whole]

full_shard trains to the end and reaches the result that the example asserts. The others train the
first steps of the same schedule, or with --whole to the end. Losses are compared with DDP's on all
ranks, bit for bit. Memory is PSS without mapped files, sampled 20 times a second, above what the
rank used before the model was made. malloc's mmap threshold is fixed, so freed memory returns to
the kernel. Runs follow one another, so their times are rough.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import RESULTS, ROOT

NAMES = ("resnet", "simclr", "swav", "image_gpt", "deepspeech", "moe", "unet")
STRATEGIES = ("ddp", "no_shard", "zero1", "shard_grad_op", "full_shard")
STRATEGIES += ("hybrid_shard", "hybrid_shard_zero2", "hybrid_full")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}

Numbers = dict[str, Any]


def run(name: str, strategy: str, flags: list[str]) -> Numbers:
    """Run an example on two ranks and return what it writes as JSON."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(ROOT / "examples" / f"{name}.py")]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "run.json"
        command += ["--strategy", strategy, "--json", str(answer), *flags]
        print(" ".join(command[3:]), flush=True)
        done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=False)
        numbers: Numbers = json.loads(answer.read_text())  # also of a result that is not reached
    return {**numbers, "reached": done.returncode == 0}


def differs_at(ours: Numbers, theirs: Numbers) -> int | None:
    """The first step, counted from 1, whose losses differ on a rank; None if all are equal."""
    pairs = [
        zip(*sides, strict=False) for sides in zip(ours["losses"], theirs["losses"], strict=True)
    ]
    found = [at for rank in pairs for at, (mine, other) in enumerate(rank, 1) if mine != other]
    return min(found, default=None)


def compare(name: str, args: argparse.Namespace) -> Numbers:
    """An example under all strategies."""
    first = ["--quick"] if args.quick else []
    short = [*first, *(() if args.whole else ("--stop-after", str(args.steps)))]
    runs = {
        strategy: run(name, strategy, first if strategy == "full_shard" else short)
        for strategy in STRATEGIES
    }
    sides = {
        strategy: {
            "steps": min(len(side["losses"][0]) for side in (numbers, runs["ddp"])),
            "differs_at": differs_at(numbers, runs["ddp"]),
            "peak_mib": numbers["peak_mib"],
            "step_ms": numbers["step_ms"],
        }
        for strategy, numbers in runs.items()
    }
    kept = ("what", "value", "expected", "baseline", "parameters", "reached")
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
    names = [name if name == "ddp" else f"`{name}`" for name in results[0]["sides"]]
    rows = []
    for each in results:
        sides = each["sides"].values()
        losses = [same(side) for side in sides]
        rows.append([f"`{each['example']}`", "losses", "-", *losses[1:]])
        rows.append(["", "peak MiB", *(f"{side['peak_mib']:.0f}" for side in sides)])
        rows.append(["", "ms per step", *(f"{side['step_ms']:.0f}" for side in sides)])
    return table(["example", "", *(name.replace("ddp", "DDP") for name in names)], rows)


def same(side: Numbers) -> str:
    """Whether losses are those of DDP."""
    at = side["differs_at"]
    return f"same, {side['steps']} steps" if at is None else f"differ from step {at}"


def page(results: list[Numbers], machine: dict[str, Any]) -> str:
    """The results as Markdown."""
    load, date = machine["load_1min"], machine["date"][:10]
    return f"""# The examples under DDP and each strategy ({date})

`python -m benchmarks.examples`: 2 ranks of one thread, torch {machine["torch"]}, {machine["cpu"]},
{machine["cores"]} cores, commit {machine["commit"]}. Other programs used the machine too
(load {load:.1f} at the start), so times are rough; losses and memory do not depend on that.

{result_table(results)}

"same" means: on both ranks, in all these steps, to the last bit. Memory is PSS without mapped
files, above what the rank used before its model was made. A step's time is the median of the run.

{side_table(results)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--steps", type=int, default=20, help="steps of all but full_shard")
    parser.add_argument("--whole", action="store_true", help="train to the end in all runs")
    parser.add_argument("--quick", action="store_true", help="tiny models; write no results")
    parser.add_argument("--out", type=Path, help="the file to write (.md; beside it, .json)")
    args = parser.parse_args()
    machine = harness.machine()
    out = args.out or (None if args.quick else RESULTS / f"{machine['date'][:10]}-examples.md")
    results: list[Numbers] = []
    for name in args.names:
        results.append(compare(name, args))
        if out:  # after each example: a later one may fail
            out.with_suffix(".json").write_text(
                json.dumps(
                    {"benchmark": "examples", "machine": machine, "results": results}, indent=1
                )
                + "\n"
            )
            out.write_text(page(results, machine))
    print(page(results, machine))
    if missed := [each["example"] for each in results if not each["reached"]]:
        sys.exit(f"not as expected: {', '.join(missed)}")


if __name__ == "__main__":
    main()
