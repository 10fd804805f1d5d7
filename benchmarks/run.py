"""Run all benchmarks, or those named. `make bench` calls this.

    python benchmarks/run.py [--quick] [--out-dir DIR] [step-time host-time memory ...]

If one fails, the others still run.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import harness

NAMES = ("host-time", "step-time", "memory", "predictions", "collectives", "optim", "saves")
"""Names on the command line and in results/; modules have underscores instead."""


def main(argv: Sequence[str] | None = None) -> int:
    there = [name for name in NAMES if source(name).exists()]
    parser = argparse.ArgumentParser(description="Run zshard's benchmarks.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(there)} (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="smoke tests, no result files")
    parser.add_argument(
        "--out-dir", type=Path, help="directory for JSON files (default: benchmarks/results)"
    )
    args = parser.parse_args(argv)
    unknown = set(args.names) - set(there)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(there)}")
    failed = [name for name in args.names or there if not run(name, args.quick, args.out_dir)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def source(name: str) -> Path:
    """Return the source file of a benchmark."""
    return harness.ROOT / "benchmarks" / f"{name.replace('-', '_')}.py"


def run(name: str, quick: bool, out_dir: Path | None) -> bool:
    """Run one benchmark and return whether it succeeded."""
    command = [sys.executable, "-m", f"benchmarks.{source(name).stem}"]
    if quick:
        command.append("--quick")
    if out_dir:
        out = out_dir.resolve() / f"{datetime.date.today()}-{name}.json"
        command.append(f"--out={out}")
    print(f"== {name}", flush=True)
    return harness.run_child(command) == 0


if __name__ == "__main__":
    harness.start(main)
