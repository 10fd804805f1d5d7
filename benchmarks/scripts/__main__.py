"""Other people's training scripts, with the lines changed that zshard needs.

    python -m benchmarks.scripts CLONES [NAME ...] [--transport c10d] [--no-clipping]

CLONES: a folder with clones of the repositories (none is part of zshard): nanoGPT, build-nanogpt,
minGPT, examples, torchtitan. Each script runs twice on two CPU ranks: with the library that it was
written for, and with zshard. What they print and save is compared. As all expect GPUs, lines about
devices are replaced on both sides alike, and sizes are made small. For packages that a script needs
and this environment lacks, set PYTHONPATH.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.scripts import for_ddp, for_fsdp
from benchmarks.scripts.running import Choices, difference_of, near, numbers, run
from benchmarks.scripts.script import Script

SCRIPTS = {script.name: script for script in (*for_ddp.SCRIPTS, *for_fsdp.SCRIPTS)}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run training scripts both ways.")
    parser.add_argument("clones", type=Path, help="the folder of the clones")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SCRIPTS))
    parser.add_argument("--transport", default="", help="zshard's (default: auto)")
    parser.add_argument(
        "--no-clipping", action="store_true", help="leave clipping out on both sides"
    )
    parser.add_argument("--keep", type=Path, help="a folder for the copies and their output")
    args = parser.parse_args(argv)
    for name in args.names:
        if name not in SCRIPTS:
            parser.error(f"unknown script {name!r}: expected one of {', '.join(SCRIPTS)}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    good, choices = True, Choices(args.transport, not args.no_clipping)
    for name in args.names or SCRIPTS:
        with tempfile.TemporaryDirectory() as folder:
            where = folder if args.keep is None else args.keep / name
            good &= compare(SCRIPTS[name], args.clones, Path(where), choices)
    sys.exit(0 if good else 1)


def compare(script: Script, clones: Path, folder: Path, choices: Choices) -> bool:
    """Run the script both ways; print and return whether they agree."""
    theirs = run(script, clones, folder / "original", False, choices)
    mine = run(script, clones, folder / "zshard", True, choices)
    apart, count = difference_of(theirs, mine, script)
    print(f"\n{script.name} ({script.commit}), {mine.changed} lines changed", end="")
    print(f": original {theirs.seconds:.0f} s, zshard {mine.seconds:.0f} s")
    for a, b in zip(theirs.printed, mine.printed, strict=False):
        print(f"  {' '.join(map(str, numbers(a))):40} {' '.join(map(str, numbers(b)))}")
    same = len(theirs.printed) == len(mine.printed) > 0 and all(
        near(a, b, script.print_tolerance)
        for a, b in zip(theirs.printed, mine.printed, strict=True)
    )
    print(f"  printed numbers agree: {same}")
    print(f"  {count} saved tensors differ by at most {apart:.1e}", flush=True)
    return same and (count > 0 or not script.saved) and apart <= script.tolerance


if __name__ == "__main__":
    main()
