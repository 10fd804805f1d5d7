"""The command line, `zshard` or `python -m zshard`:

python -m zshard run: start a script on several ranks (extras/run/launch.py).
python -m zshard doctor [--json]: what is available, what zshard will use, and how to get the rest.
python -m zshard plan: memory and speed on GPUs, predicted without them (extras/planner/command.py).
python -m zshard ckpt: checkpoints (extras/checkpoint_cli.py).
python -m zshard trace: merge traces of ranks, and report on them (extras/trace/).

Doctor prints zshard.available_features() and versions: every fact is queried or tried.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import sys
from pathlib import Path

from zshard.api import __version__
from zshard.extras import checkpoint_cli as cli
from zshard.extras import trace
from zshard.extras.doctor import facts, report
from zshard.extras.planner import command as planner
from zshard.extras.run import launch


def main() -> int:
    """Run the command that the arguments name; return its exit status."""
    try:
        try:
            return _run()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough, and what is left to flush goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run() -> int:
    program = "zshard" if Path(sys.argv[0]).name == "zshard" else "python -m zshard"
    if sys.argv[1:2] == ["run"]:  # run takes torchrun's options after its own
        return launch.main(sys.argv[2:], f"{program} run")
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--version", action="version", version=f"zshard {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    commands.add_parser("run", help=launch.HELP)
    doctor = commands.add_parser(
        "doctor",
        help="report what zshard finds and will use, and what is missing; exit status 1 if a GPU "
        "cannot be used",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON, for a bug report")
    doctor.set_defaults(run=_doctor)
    planner.add_command(commands)
    cli.add_commands(commands)
    trace.add_command(commands)
    output = io.StringIO()  # commands report an OSError as their own: a closed pipe is not theirs
    try:
        with contextlib.redirect_stdout(output):
            args = parser.parse_args()
            status: int = args.run(args)
    finally:
        print(output.getvalue(), end="")
    return status


def _doctor(args: argparse.Namespace) -> int:
    found = facts()
    text, status = report(found)
    print(json.dumps(found, indent=1) if args.json else text)
    return status


if __name__ == "__main__":
    sys.exit(main())
