"""Runs clang-tidy on C files, on all cores: `python tools/tidy.py csrc/unit/unit_bind.c ...`.

Clang reads a file with the flags that setup.py compiles it with, so no list of
commands is kept. .clang-tidy lists the checks, and why others are off.
"""

import os
import re
import runpy
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from clang_tidy import get_executable

ROOT = Path(__file__).resolve().parents[1]
AT_ONCE = 8  # files of one process: starting one takes as long as reading a file
PROGRESS = re.compile(r"\[\d+/\d+\] Processing|\d+ (warning|error)s? |Suppressed ")


def compile_flags() -> list[str]:
    """setup.py's command to compile C."""
    setup = runpy.run_path(str(ROOT / "setup.py"))
    flags = [*setup["C"], "-pthread", f"-iquote{ROOT / 'csrc'}"]
    return [*flags, "-isystem", sysconfig.get_path("include")]


def check(files: list[str], flags: list[str]) -> str:
    """clang-tidy's complaints about `files`; "" if there are none."""
    command = [str(get_executable("clang-tidy")), "--quiet", *files, "--", *flags]
    done = subprocess.run(command, text=True, stdout=-1, stderr=subprocess.STDOUT, check=False)
    said = [line for line in done.stdout.splitlines() if not PROGRESS.match(line)]
    return "\n".join(said or [f"exit status {done.returncode}"]) if done.returncode else ""


def main(files: list[str]) -> int:
    """Checks all files; 1 if there are findings."""
    parts = -(-len(files) // AT_ONCE)
    shares = [files[i::parts] for i in range(parts)]  # with long and short files in each
    flags = compile_flags()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        findings = list(filter(None, pool.map(lambda share: check(share, flags), shares)))
    print(*findings, sep="\n", end="\n" if findings else "")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
