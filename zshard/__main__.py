"""python -m zshard doctor: what is here, what will be used, and what to do about what is missing.

The one idea: it prints what zshard.features() finds, and nothing that was not asked for and tried.
"""

from __future__ import annotations

import argparse
import sys

from zshard._features import report


def main() -> int:
    """Runs the command that the arguments name; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m zshard")
    commands = parser.add_subparsers(required=True, metavar="command")
    commands.add_parser(
        "doctor", help="what is here, what is used, what is missing; 1: a GPU is idle"
    )
    parser.parse_args()
    text, status = report()
    print(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
