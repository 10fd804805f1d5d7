"""The work of a rank in a soak (kills.py): rounds of training with faults, compared with runs
without.

A round has a strategy, a transport, an optimizer and faults, all drawn from the seed and the
round's number. The model is trained twice, first undisturbed. Losses of each step and the weights
at the end must be the same, bit for bit, also after kill -9 of a rank, whose restart continues.
Between rounds nothing is left, so that is when memory, descriptors and threads are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import math
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matrix_job import Spot
from torch import Tensor, nn

import zshard

STEPS = 6
WIDTH = 64
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda params: zshard.AdamW(params, lr=1e-2),
    "SGD": lambda params: zshard.SGD(params, lr=1e-2, momentum=0.9),
    "AdamW8bit": lambda params: zshard.AdamW8bit(params, lr=1e-2, min_8bit_size=64),
}
FAULTS = ("nan", "forward", "backward", "loader", "save", "evaluate", "state", "copy")
ENDS = ("kill", "uncaught")
"""Faults that end the run's processes."""


class Caught(Exception):
    """Raised and caught by a script."""


class Intended(Exception):
    """Ends this process."""


class Round:
    """The events of a round; the same on all ranks, and in each run with the seed."""

    def __init__(self, seed: int, number: int, life: int) -> None:
        draw = random.Random(f"{seed} {number}")
        self.number = number
        self.transport = draw.choice(("shm", "c10d"))
        self.strategy = draw.choice(("full_shard", "shard_grad_op", "zero1", "no_shard"))
        self.optimizer = draw.choice([*OPTIMIZERS])
        self.faults = {step: draw.choice(FAULTS) for step in range(STEPS) if draw.random() < 0.6}
        self.rank = draw.randrange(2)  # where a fault of one rank happens
        if number % life == life - 1:
            self.faults[draw.randrange(STEPS)] = draw.choice(ENDS)
        # A kept run of each second round: others have faults that such runs refuse.
        self.kept = bool(number % 2) or any(fault in ENDS for fault in self.faults.values())

    def __str__(self) -> str:
        what = ", ".join(f"{step}: {fault}" for step, fault in sorted(self.faults.items()))
        kind = f"{self.strategy}, {self.transport}, {self.optimizer}"
        return f"round {self.number} ({kind}; faults on rank {self.rank}: {what or 'none'})"


class Training:
    """A model and its optimizer."""

    def __init__(self, plan: Round, kept: bool) -> None:
        torch.manual_seed(plan.number)
        self.plan, self.rank = plan, dist.get_rank()
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        self.spot = Spot()
        module = nn.Sequential(*layers, nn.Tanh(), self.spot, nn.Linear(WIDTH, 1))
        self.model: Any = zshard.FSDP(
            module,
            strategy=plan.strategy,
            transport=plan.transport,
            auto_wrap_policy={nn.Linear},
            nonfinite="skip",
            check_replicas=2,
            timeout=60,
        )
        self.optimizer = OPTIMIZERS[plan.optimizer](list(self.model.parameters()))
        name = f"round {plan.number}"
        self.kept = zshard.Keep(self.model, self.optimizer, name=name) if kept else None

    def loss(self, step: int, scale: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.plan.number + 10 * step + self.rank)
        x = torch.randn(8, WIDTH, generator=generator)
        return (self.model(x * scale) - x.sum(1, keepdim=True)).square().mean()

    def step(self, step: int, scale: float = 1.0) -> str:
        """Train a step and return its loss, exactly."""
        loss = self.loss(step, scale)
        loss.backward()
        self.model.clip_grad_norm_(0.5)
        with self.kept.commit({"step": step + 1}) if self.kept else contextlib.nullcontext():
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item().hex()

    def weights(self) -> list[str]:
        values = self.model.state_dict().values()
        return [value.double().sum().item().hex() for value in values]


@torch.no_grad()
def disturb(training: Training, fault: str, step: int, folder: Path) -> None:
    """Do what goes wrong, or is done besides, before a step."""
    plan, model = training.plan, training.model
    is_here = training.rank == plan.rank
    if fault in ENDS:
        end(plan, fault, folder / f"ended {plan.number} {step}", is_here)
    elif fault == "nan" and training.kept is None:  # a skipped step would count as a kept one
        with torch.enable_grad():
            training.step(step, math.nan if is_here else 1.0)
    elif fault in ("forward", "backward"):
        training.spot.at = partial(fail, fault)
        with contextlib.suppress(Caught), torch.enable_grad():
            training.loss(step).backward()
            raise AssertionError(f"{fault} did not raise")
        del training.spot.at
        training.optimizer.zero_grad()
    elif fault == "loader" and is_here:
        time.sleep(0.02)
    elif fault == "save":
        save(training, folder / "checkpoint")
    elif fault == "evaluate" and (is_here or plan.transport != "shm"):
        training.loss(step)
    elif fault == "state" and (is_here or plan.transport != "shm"):
        training.weights()
    elif fault == "copy":
        copy.deepcopy(model)(torch.ones(1, WIDTH))


def fail(where: str, place: str) -> None:
    if place == where:
        raise Caught


def end(plan: Round, how: str, mark: Path, is_here: bool) -> None:
    dist.barrier()
    if not is_here or mark.exists():
        return
    mark.touch()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise Intended(f"{plan} ends here")


def save(training: Training, folder: Path) -> None:
    before = training.weights()
    zshard.save(folder, training.model, training.optimizer)
    if training.kept is None:  # loading is a write that a kept run refuses
        zshard.load(folder, training.model, training.optimizer)
    assert before == training.weights(), "a checkpoint does not give back what was saved"
    dist.barrier()
    if training.rank == 0:
        shutil.rmtree(folder)
    dist.barrier()


def play(plan: Round, folder: Path) -> None:
    """Play a round; raises AssertionError if faults have changed its results."""
    plain = Training(plan, kept=False)
    expected = [plain.step(step) for step in range(STEPS)], plain.weights()
    del plain
    training = Training(plan, plan.kept)
    start = training.kept.recover({"step": 0})["step"] if training.kept else 0
    losses = []
    for step in range(start, STEPS):
        disturb(training, plan.faults.get(step, ""), step, folder)
        losses.append(training.step(step))
    results = expected[0][:start] + losses, training.weights()
    assert results == expected, f"{plan}: {results} instead of {expected}"
    dist.barrier()
    if training.kept:
        training.kept.close()
    dist.barrier()


def numbers(args: argparse.Namespace) -> Iterator[int]:
    """Yield the numbers of the rounds, from the one that the processes before have begun."""
    mark = args.folder / "round"
    number = int(mark.read_text()) if mark.exists() else args.first
    while True:
        over = [time.time() > args.until or number >= args.first + args.rounds]
        dist.broadcast_object_list(over, 0)
        if over[0]:
            return
        if dist.get_rank() == 0:
            mark.write_text(str(number))
        yield number
        number += 1


def vitals(pid: int) -> dict[str, float]:
    """Return a process's memory in MiB, private and shared, its descriptors and threads."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {
        "private": int(fields["RssAnon"].split()[0]) / 1024,
        "shared": int(fields["RssShmem"].split()[0]) / 1024,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(fields["Threads"]),
    }


def play_all(args: argparse.Namespace, say: Callable[..., None]) -> None:
    warnings.filterwarnings("ignore", message="all ranks skip this step")
    dist.init_process_group("gloo")
    for number in numbers(args):
        plan = Round(args.seed, number, args.life)
        print(f"rank {dist.get_rank()}: {plan}", flush=True)
        try:
            play(plan, args.folder)
        except (Intended, zshard.PeerError):
            raise
        except Exception as error:
            (args.folder / "wrong").write_text(f"{plan}: {type(error).__name__}: {error}")
            raise
        gc.collect()
        say("round", {"pid": os.getpid(), "round": number, **vitals(os.getpid())})
    dist.destroy_process_group()
