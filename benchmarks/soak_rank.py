"""One rank of benchmarks.soak: rounds of training with faults, each compared with a run without.

A round has a strategy, a transport, an optimizer and faults, all drawn from the seed and the
round's number. The model is trained twice, first undisturbed. Losses of each step and the weights
at the end must be the same, to the bit, also after kill -9 of a rank, whose restart continues.
Between rounds nothing is left, so that is when memory, descriptors and threads are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import math
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zshard

STEPS = 6
WIDTH = 64
TRANSPORTS = ("shm", "c10d")
STRATEGIES = ("full_shard", "shard_grad_op", "zero1", "no_shard")
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda params: zshard.AdamW(params, lr=1e-2),
    "SGD": lambda params: zshard.SGD(params, lr=1e-2, momentum=0.9),
    "AdamW8bit": lambda params: zshard.AdamW8bit(params, lr=1e-2, min_8bit_size=64),
}
FAULTS = ("nan", "forward", "backward", "loader", "save", "evaluate", "state", "copy")
ENDS = ("kill", "uncaught")
"""Faults that end the run's processes."""


class Caught(Exception):
    """What a script raises and catches."""


class Intended(Exception):
    """Ends this process."""


class Round:
    """What happens in a round; the same on all ranks, and in each run with the seed."""

    def __init__(self, seed: int, number: int, life: int) -> None:
        draw = random.Random(f"{seed} {number}")
        self.number = number
        self.transport, self.strategy = draw.choice(TRANSPORTS), draw.choice(STRATEGIES)
        self.optimizer = draw.choice([*OPTIMIZERS])
        self.faults = {step: draw.choice(FAULTS) for step in range(STEPS) if draw.random() < 0.6}
        self.rank = draw.randrange(2)  # where a fault of one rank happens
        if number % life == life - 1:
            self.faults[draw.randrange(STEPS)] = draw.choice(ENDS)

    def __str__(self) -> str:
        what = ", ".join(f"{step}: {fault}" for step, fault in sorted(self.faults.items()))
        kind = f"{self.strategy}, {self.transport}, {self.optimizer}"
        return f"round {self.number} ({kind}; faults on rank {self.rank}: {what or 'none'})"


class Net(nn.Module):
    """Raises on request, within forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 1)
        self.raises = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).tanh()
        if self.raises == "forward":
            raise Caught
        if self.raises == "backward":
            x.register_hook(self._fail)  # type: ignore[no-untyped-call]
        return self.head(x)  # type: ignore[no-any-return]

    def _fail(self, grad: Tensor) -> None:
        raise Caught


class Training:
    """A model and its optimizer."""

    def __init__(self, plan: Round, kept: bool) -> None:
        torch.manual_seed(plan.number)
        self.plan, self.rank = plan, dist.get_rank()
        self.model: Any = zshard.FSDP(
            Net(),
            strategy=plan.strategy,
            transport=plan.transport,
            auto_wrap_policy={nn.Linear},
            nonfinite="skip",
            check_replicas=2,
            timeout=60,
        )
        self.optimizer = OPTIMIZERS[plan.optimizer](list(self.model.parameters()))
        own = (self.model, self.optimizer)
        self.kept = zshard.Keep(*own, name=f"round {plan.number}") if kept else None

    def loss(self, step: int, scale: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.plan.number + 10 * step + self.rank)
        x = torch.randn(8, WIDTH, generator=generator)
        found: Tensor = (self.model(x * scale) - x.sum(1, keepdim=True)).square().mean()
        return found

    def step(self, step: int, scale: float = 1.0) -> str:
        """Train a step and return its loss, exactly."""
        loss = self.loss(step, scale)
        loss.backward()  # type: ignore[no-untyped-call]
        self.model.clip_grad_norm_(0.5)
        block = self.kept.commit({"step": step + 1}) if self.kept else contextlib.nullcontext()
        with block:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item().hex()

    def weights(self) -> list[str]:
        values = self.model.state_dict().values()
        return [value.double().sum().item().hex() for value in values]


class Faults:
    """What goes wrong, or is done besides, before a step."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder = training, folder
        self.plan, self.is_here = training.plan, training.rank == training.plan.rank

    def before(self, step: int) -> None:
        fault = self.plan.faults.get(step)
        if fault in ENDS:
            self._end(step, fault)
        elif fault is not None:
            getattr(self, f"_{fault}")(step)

    def _end(self, step: int, how: str) -> None:
        mark = self.folder / f"ended {self.plan.number} {step}"
        dist.barrier()
        if not self.is_here or mark.exists():
            return
        mark.touch()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise Intended(f"{self.plan} ends here")

    def _nan(self, step: int) -> None:
        if self.training.kept is None:  # a skipped step would count as one of the kept run
            self.training.step(step, math.nan if self.is_here else 1.0)

    def _forward(self, step: int) -> None:
        self._raising("forward", step)

    def _backward(self, step: int) -> None:
        self._raising("backward", step)

    def _raising(self, where: str, step: int) -> None:
        model = self.training.model
        model.raises = where
        try:
            self.training.loss(step).backward()  # type: ignore[no-untyped-call]
        except Caught:
            self.training.optimizer.zero_grad()
        else:
            raise AssertionError(f"{where} did not raise")
        finally:
            model.raises = ""

    def _loader(self, step: int) -> None:
        with contextlib.suppress(Caught):
            if self.is_here:
                time.sleep(0.02)
                raise Caught

    def _save(self, step: int) -> None:
        training, folder = self.training, self.folder / "checkpoint"
        before = training.weights()
        zshard.save(folder, training.model, training.optimizer)
        if training.kept is None:  # loading is a write that a kept run refuses
            zshard.load(folder, training.model, training.optimizer)
        if before != training.weights():
            raise AssertionError("a checkpoint does not give back what was saved")
        dist.barrier()
        if training.rank == 0:
            shutil.rmtree(folder)
        dist.barrier()

    def _evaluate(self, step: int) -> None:
        if self.is_here or self.plan.transport != "shm":
            with torch.no_grad():
                self.training.loss(step)

    def _state(self, step: int) -> None:
        if self.is_here or self.plan.transport != "shm":
            self.training.weights()

    def _copy(self, step: int) -> None:
        copied = copy.deepcopy(self.training.model)
        with torch.no_grad():
            copied(torch.ones(1, WIDTH))


def played(plan: Round, folder: Path, kept: bool) -> None:
    """Play a round; raises AssertionError if faults have changed its results."""
    plain = Training(plan, kept=False)
    expected = [plain.step(step) for step in range(STEPS)], plain.weights()
    del plain
    training = Training(plan, kept)
    start = training.kept.recover({"step": 0})["step"] if training.kept else 0
    faults, losses = Faults(training, folder), []
    for step in range(start, STEPS):
        faults.before(step)
        losses.append(training.step(step))
    found = expected[0][:start] + losses, training.weights()
    if found != expected:
        raise AssertionError(f"{plan}: {found} instead of {expected}")
    dist.barrier()
    if training.kept:
        training.kept.close()
    dist.barrier()


def rounds(args: argparse.Namespace) -> Iterator[int]:
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name in ("seed", "first", "rounds", "life"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--until", type=float)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="all ranks skip this step")
    dist.init_process_group("gloo")
    name = f"rank {dist.get_rank()}"
    with (args.folder / f"{name}.log").open("a") as log:
        for number in rounds(args):
            plan = Round(args.seed, number, args.life)
            print(f"{name}: {plan}", flush=True)
            # A kept run of each second round: others have faults that such runs refuse.
            kept = bool(number % 2) or any(fault in ENDS for fault in plan.faults.values())
            try:
                played(plan, args.folder, kept)
            except (Intended, zshard.PeerError):
                raise
            except Exception as error:
                (args.folder / "wrong").write_text(f"{plan}: {type(error).__name__}: {error}")
                raise
            gc.collect()
            line = {"at": time.time(), "pid": os.getpid(), "round": number, **vitals(os.getpid())}
            print(json.dumps(line), file=log, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
