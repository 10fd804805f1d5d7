"""A training loop in which the last rank fails in a chosen way at one place (test_failures.py).

The error that the other ranks then raise, and how many seconds after the failure, comes back as an
`End`. The clock is CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import zshard
from zshard import FSDP

STEPS = 4
BAD_STEP = 2
PLANTED = "planted at step 2"


@dataclass(frozen=True)
class End:
    """How a rank's loop ended: the exception's type, or "" if none, and seconds since the
    failure."""

    kind: str
    message: str
    seconds: float


class Misdeed:
    """What the last rank does, and when; on the other ranks it never happens."""

    def __init__(self, deed, place, folder):
        self.deed, self.place, self.folder = deed, place, Path(folder)
        self.due = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        self.step = -1

    def at(self, place):
        if not self.due or place != self.place or self.step != BAD_STEP:
            return
        self.due = False
        (self.folder / "pid").write_text(str(os.getpid()))
        (self.folder / "time").write_text(str(time.monotonic()))
        if self.deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.deed == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.deed == "exit":
            sys.exit(0)
        elif self.deed == "raise":
            raise ValueError(PLANTED)

    def end(self, error):
        """Return the `End` of a loop that `error` (None: nothing) ended."""
        stamp = self.folder / "time"
        since = time.monotonic() - float(stamp.read_text()) if stamp.exists() else 0.0
        return End(type(error).__name__ if error else "", str(error or ""), since)

    def end_of(self, loop):
        """Run `loop()` and return its `End`, unless it raises what was planted."""
        try:
            loop()
        except Exception as error:
            if str(error) == PLANTED:
                raise
            return self.end(error)
        return self.end(None)


class Spot(nn.Module):
    """The identity; fails in forward or in backward if that is the place."""

    def __init__(self, misdeed):
        super().__init__()
        self.misdeed = misdeed

    def forward(self, x):
        self.misdeed.at("forward")
        if x.requires_grad:
            x.register_hook(lambda grad: self.misdeed.at("backward"))
        return x


def make_model(misdeed):
    torch.manual_seed(0)
    parts = [nn.Linear(8, 16), nn.Linear(16, 16), Spot(misdeed), nn.Linear(16, 8)]
    return nn.Sequential(*parts)


def batch(step):
    """The same on all ranks, so that the mean of the gradients equals each rank's own."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def step_once(model, optimizer, misdeed, step):
    misdeed.step = step
    loss = model(batch(step)).square().sum()
    loss.backward()
    misdeed.at("step")
    optimizer.step()
    optimizer.zero_grad()


def wrap(model, transport, timeout=None, strategy="full_shard"):
    policy = {nn.Linear}
    return FSDP(
        model, strategy=strategy, auto_wrap_policy=policy, transport=transport, timeout=timeout
    )


def train(deed, place, folder, transport, timeout=60.0, strategy="full_shard"):
    """Run the loop with the failure; return its `End`."""
    misdeed = Misdeed(deed, place, folder)

    def loop():
        model = wrap(make_model(misdeed), transport, timeout, strategy)
        optimizer = zshard.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            step_once(model, optimizer, misdeed, step)

    return misdeed.end_of(loop)


def check_survivors(results, kinds, *words, within=5.0):
    """Check that all ranks but the last ended by themselves with an error of `kinds` that contains
    `words`, or that names another of them, which had already ended with such an error."""
    survivors = {f"see the output of rank {result.rank} for the cause" for result in results[:-1]}
    for result in results[:-1]:
        assert result.returncode == 0, f"rank {result.rank}: {result.returncode}\n{result.stderr}"
        end = result.value
        assert end.kind in kinds, f"rank {result.rank} ended with {end}"
        if any(other in end.message for other in survivors):
            continue
        missing = [word for word in words if word not in end.message]
        assert not missing, f"{missing} not in: {end.message}"
        assert end.seconds < within, f"rank {result.rank} took {end.seconds:.1f} s"
