"""What a rank of a row runs: a script, whose result or exception it writes to the row's folder."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.failures import loading, saving, steps, together, wrapping
from benchmarks.failures.job import Job
from benchmarks.failures.rows import ROWS

SCRIPTS: dict[str, Any] = {
    name: value
    for module in (wrapping, steps, together, saving, loading)
    for name, value in vars(module).items()
}


@contextlib.contextmanager
def answering(path: Path) -> Iterator[dict[str, Any]]:
    """A context that writes what a script returned or raised, and when."""
    answer: dict[str, Any] = {"began": time.monotonic()}
    try:
        yield answer
    except BaseException as error:
        if not isinstance(error, SystemExit):
            answer |= {"error": type(error).__name__, "message": str(error)}
        raise
    finally:
        answer["at"] = time.monotonic()
        path.write_text(json.dumps(answer))


def play(name: str, side: str, folder: str, phase: int, timeout: float) -> None:
    """Run a rank of a row's script; what it raises ends the rank, as in a user's script."""
    row = ROWS[name]
    script, *arguments = row.scripts[phase].split()
    torch.set_num_threads(1)
    job = Job(side, Path(folder), timeout)
    if row.begun:
        job.begin()
    with answering(job.folder / f"answer{job.rank}") as answer:
        answer["wrong"] = SCRIPTS[script](job, *arguments) or ""
