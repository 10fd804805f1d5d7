"""A rank of kills.py: trains, and writes when it does what, for a driver that kills it.

Each line of FOLDER/RANK.log is a list: seconds of CLOCK_MONOTONIC, which all processes share; what
ended then; a number. Imports are timed, so they are not at the top.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODELS = {"demo": (6, 256, 128, 4), "gpt85m": (12, 768, 64, 2), "tiny": (8, 64, 16, 2)}
"""Layers, width, sequence and rows of each; "tiny" has next to no arithmetic."""


def main() -> None:
    """sys.argv[1]: a folder, and what kills.py asks for: a model to train, or else a soak."""
    args = argparse.Namespace(**json.loads(sys.argv[1]))
    args.folder = Path(args.folder)
    say = log_of(args.folder / f"{os.environ['RANK']}.log")
    if hasattr(args, "model"):
        recover_and_train(args, say)
    else:
        import kills_rounds

        kills_rounds.play_all(args, say)


def log_of(path: Path) -> Callable[..., None]:
    """Return a function that writes a line at once, so that it outlives kill -9."""
    file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def say(what: Any, number: Any = 0, at: float | None = None) -> None:
        at = time.monotonic() if at is None else at
        os.write(file, f"{json.dumps([at, what, number])}\n".encode())

    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    boot = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    say("start", os.getpid(), at=ticks / os.sysconf("SC_CLK_TCK") - boot)
    say("python")
    return say


def recover_and_train(args: argparse.Namespace, say: Callable[..., None]) -> None:
    with contextlib.suppress(OSError):  # torchrun gives ranks sessions, between which nice is void
        Path("/proc/self/autogroup").write_text(str(os.nice(0)))
    rank = int(os.environ["RANK"])
    import torch
    import torch._dynamo  # which the first optimizer imports

    say("torch")
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    import zshard
    from benchmarks.models import gpt

    say("imports")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    say("group")
    workload = gpt("", *MODELS[args.model])
    module = workload.build()
    say("model")
    model = zshard.FSDP(module, auto_wrap_policy=workload.units)
    optimizer = zshard.AdamW(model.parameters(), lr=workload.lr)
    say("wrapped")
    kept = zshard.Keep(model, optimizer)
    start = kept.recover({"step": 0})["step"]
    say("recovered")
    for step in range(start, args.steps):
        batch = workload.batch(torch.Generator().manual_seed(1000 * step + rank))
        workload.loss(model, batch).backward()
        with kept.commit({"step": step + 1}):
            optimizer.step()
        optimizer.zero_grad()
        say("end", step)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
