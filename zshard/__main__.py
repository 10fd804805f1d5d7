"""python -m zshard doctor: what is here, what will be used, and what to do about what is missing.
python -m zshard ckpt: checkpoints (see _checkpoint/cli.py).

The one idea: doctor prints what zshard.features() finds, and nothing that was not asked for and
tried.
"""

from __future__ import annotations

import argparse
import sys

from zshard._checkpoint import cli
from zshard._features import report


def main() -> int:
    """Runs the command that the arguments name; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m zshard")
    commands = parser.add_subparsers(required=True, metavar="command")
    doctor = commands.add_parser(
        "doctor", help="what is here, what is used, what is missing; 1: a GPU is idle"
    )
    doctor.set_defaults(run=_doctor)
    cli.add_commands(commands)
    args = parser.parse_args()
    status: int = args.run(args)
    return status


def _doctor(_: argparse.Namespace) -> int:
    text, status = report()
    print(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
