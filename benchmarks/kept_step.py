"""How long is an optimizer step that another process can finish, compared with the plain one?

    python -m benchmarks.kept_step [--millions 40] [--rounds 8]

AdamW in float32 on one thread, without Python or torch (kept_step_driver.c, compiled at startup):
the loops alone, in memfds. The two take turns of 131,072 elements, so a ratio compares neighbors in
time; a round is a pass over all elements. Time per element in nanoseconds.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Spread

SOURCES = ("optim/kept_area", "optim/kept_step", "optim/optim_cpu", "optim/optim_compact")
SOURCES += ("device/device_cpu", "base/simd", "base/status", "base/clock")
FLAGS = ("-std=c11", "-O3", "-DNDEBUG", "-pthread", "-ffp-contract=off")
FLAGS += ("-fno-math-errno", "-fno-trapping-math")


def main(argv: Sequence[str] | None = None) -> None:
    rounds = "passes over all elements (default: 8; with --quick: 1)"
    parser = harness.parser("Compare a kept optimizer step with the plain one.", rounds=rounds)
    parser.add_argument("--millions", type=int, help="elements (default: 40; with --quick: 1)")
    args = parser.parse_args(argv)
    millions = args.millions or (1 if args.quick else 40)
    program = build(harness.ROOT / "build" / "benchmarks")
    command = [str(program), str(millions), str(args.rounds or (1 if args.quick else 8))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    pairs = [(float(plain), float(kept)) for plain, kept in lines]
    spreads = {
        "plain_ns": Spread.of([plain for plain, _ in pairs]),
        "kept_ns": Spread.of([kept for _, kept in pairs]),
        "ratio": Spread.of([kept / plain for plain, kept in pairs]),
    }
    for name, spread in spreads.items():
        print(f"{name:9} {spread.text(3)}")
    result = {name: spread.as_dict() for name, spread in spreads.items()}
    harness.finish(args, "kept-step", [{"millions": millions, **result}])


def build(folder: Path) -> Path:
    """Compile the driver; return the program's path."""
    target, source = folder / "kept_step_driver", harness.ROOT / "csrc"
    folder.mkdir(parents=True, exist_ok=True)
    files = [harness.ROOT / "benchmarks" / "kept_step_driver.c"]
    files += [source / f"{name}.c" for name in SOURCES]
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, *FLAGS, f"-iquote{source}", *map(str, files), "-lm", "-o", str(target)]
    subprocess.run(command, check=True)
    return target


if __name__ == "__main__":
    harness.start(main)
