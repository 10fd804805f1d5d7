"""Follows a page as a reader does: saves its Python blocks as train.py, types its commands, in their order.

A command is a line of a block of bash or without a language, up to its comment. `kill -9 PID` is typed while the command
before it runs, once that has printed the last line that the page shows of it, and for the process that it has named.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
STARTED = re.compile(r"rank 1 of \d+ is process (\d+)")


def steps_of(text: str) -> Iterator[tuple[str, str]]:
    """("python", a script), ("command", a line) and ("shown", output of the command), in the page's order."""
    for language, body in BLOCK.findall(text):
        if language in ("", "bash"):
            lines = (re.sub(r"\s+# .*", "", line) for line in body.splitlines())
            yield from (("command", line.rstrip()) for line in lines if line.strip())
        elif language in ("python", "text"):
            yield ("shown" if language == "text" else language), body


def commands_of(text: str) -> list[str]:
    return [line for kind, line in steps_of(text) if kind == "command"]


def follow(
    text: str,
    folder: Path,
    env: Mapping[str, str],
    instead: Mapping[str, str | None],
    limit: float = 100,
) -> list[tuple[str, str]]:
    """Follow a page in `folder`; return each command and what it printed.

    instead: typed in place of a command; None: nothing is typed. A command that fails raises, unless it was killed.
    """
    said: list[tuple[str, str]] = []
    steps = [*steps_of(text)]
    for index, (kind, body) in enumerate(steps):
        line = instead.get(body, body) if kind == "command" else None
        if kind == "python":
            (folder / "train.py").write_text(body)
        if line is None or line.startswith("kill "):
            continue
        following = [step for step in steps[index + 1 :] if step[0] != "python"][:2]
        kill = [word for kind, word in following if kind == "command" and word.startswith("kill ")]
        until = following[0][1].splitlines()[-1] if kill else None
        code, output = _typed(line, folder, env, until, limit)
        assert (code != 0) if kill else (code == 0), f"{line}: exit status {code}\n{output}"
        said.append((body, output))
    return said


def _typed(
    line: str, folder: Path, env: Mapping[str, str], until: str | None, limit: float
) -> tuple[int, str]:
    """Run a line to its end; its exit status and output. until: then kill -9 its rank 1."""
    with subprocess.Popen(
        ["bash", "-c", line],
        cwd=folder,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        output, end = "", time.monotonic() + limit
        try:
            for printed in process.stdout if until is not None else ():
                output += printed
                if printed.startswith(until.partition(":")[0] + ":"):
                    os.kill(int(STARTED.findall(output)[0]), signal.SIGKILL)
                    break
            rest, _ = process.communicate(timeout=max(1.0, end - time.monotonic()))
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output + rest
