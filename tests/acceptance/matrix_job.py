"""A rank of a row of the failure matrix: a small model, a training loop with places for faults, and
the expected results.

The model, the batches and the loop are the same under each library. Each rank has its own batches;
`plain` trains the unwrapped model on all of them in one process, as the reference of a correct run.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matrix_sides import BY_NAME, Full
from torch import nn

STEPS = 4
BAD = 2
"""The step in which the last rank fails."""

WIDTH = 32


class Net(nn.Module):
    """Modules and parameters, and a function of them and a batch as the forward."""

    def __init__(self, function: Callable[..., torch.Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, torch.Tensor) else part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


class Spot(nn.Module):
    """The identity; a place in forward and in backward."""

    at = staticmethod(lambda place: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = self.at
        at("forward")
        if x.requires_grad:
            x.register_hook(lambda grad: at("backward"))
        return x


def linear(out: int = WIDTH, **options: Any) -> nn.Linear:
    return nn.Linear(WIDTH, out, **options)


class Job:
    """This rank's side of a row."""

    def __init__(self, side: str, folder: Path, timeout: float) -> None:
        self.side, self.folder, self.timeout = BY_NAME[side], folder, timeout
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.last = self.rank == 1
        self.place, self.planned = "", ""  # where to do what in step BAD
        self.caught: tuple[type[Exception], ...] = ()
        self.number = 0  # of the step
        self.options: Mapping[str, Any] = {}  # of wrap() in train()

    def begin(self) -> None:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=self.timeout))

    # --- faults -------------------------------------------------------------------------------

    def fault(self, victim: bool = False) -> None:
        """Note when the fault happened; victim: what becomes of this rank is no outcome."""
        with contextlib.suppress(FileExistsError), open(self.folder / "fault", "x") as file:
            file.write(str(time.monotonic()))
        if victim:
            (self.folder / f"victim{self.rank}").touch()

    def do(self, fault: str) -> None:
        """Do what becomes of a victim."""
        self.fault(victim=True)
        if fault in ("SIGKILL", "SIGSTOP"):
            os.kill(os.getpid(), signal.Signals[fault])
        elif fault == "raise":
            raise LookupError("planted")
        elif fault == "exit":
            sys.exit(0)
        elif fault == "allocate":  # more than there is
            torch.empty(1 << 50)
        elif fault == "sleep":  # beyond the timeout
            time.sleep(self.timeout + 3)

    def at(self, place: str) -> None:
        """Inject on the last rank, once, in step BAD, the fault planned for this place."""
        if self.last and self.number == BAD and place == self.place:
            self.place = ""
            self.do(self.planned)

    # --- training -----------------------------------------------------------------------------

    def model(self, seed: int = 0) -> nn.Sequential:
        torch.manual_seed(seed)
        first, second, third = (linear() for _ in range(3))
        return nn.Sequential(first, Spot(), second, nn.Tanh(), third)

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        for module in model.modules():
            if isinstance(module, Spot):
                module.at = self.at
        return self.side.wrap(model, **options)

    def sgd(self, model: nn.Module) -> torch.optim.Optimizer:
        params = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    def wrapped(self, model: nn.Module | None = None) -> tuple[Any, torch.optim.Optimizer]:
        """Return a wrapped model (None: of a fresh one) and its optimizer."""
        wrapped = self.wrap(self.model() if model is None else model, **self.options)
        return wrapped, self.sgd(wrapped)

    def edit(self, batch: torch.Tensor, step: int, rank: int | None) -> None:
        """Change a batch; scripts set it."""

    def batch(self, step: int, rank: int | None = None) -> torch.Tensor:
        """Return the batch of a rank; None: of this one."""
        seed = 1000 * step + (self.rank if rank is None else rank)
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
        self.edit(batch, step, rank)
        return batch

    def step(self, model: nn.Module, optimizer: Any, number: int, clip: float = 0.0) -> None:
        self.number = number
        optimizer.zero_grad()
        batch = self.batch(number)
        self.at("batch")
        loss_of(model(batch)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, clip)
        self.at("step")
        optimizer.step()
        self.at("end")

    def steps(self, model: nn.Module, optimizer: Any, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.step(model, optimizer, number)

    def train(
        self, make: Callable[[], nn.Module] | None = None, steps: int = STEPS, clip: float = 0.0
    ) -> str:
        """Train; return the parameters' faults afterwards."""
        make = make or self.model
        model, optimizer = self.wrapped(make())
        for number in range(steps):
            with contextlib.suppress(*self.caught):
                self.step(model, optimizer, number, clip)
        return differences(self.side.full(model), self.plain(make(), steps, clip))

    def trained(self, steps: int = STEPS) -> tuple[Any, Any]:
        """Return a wrapped model and its optimizer after some steps."""
        model, optimizer = self.wrapped()
        self.steps(model, optimizer, range(steps))
        return model, optimizer

    # --- expected results -------------------------------------------------------------------------

    def plain(self, model: nn.Module, steps: int = STEPS, clip: float = 0, world: int = 2) -> Full:
        """Train a model that is not wrapped on all ranks' batches; return its parameters."""
        optimizer = self.sgd(model)
        for number in range(steps):
            optimizer.zero_grad()
            for rank in range(world):
                (loss_of(model(self.batch(number, rank))) / world).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1, clip)
            optimizer.step()
        return dict(model.state_dict())

    def wrong(self, model: nn.Module, steps: int = STEPS) -> str:
        """Return the faults of a model that should have been trained for `steps`."""
        return differences(self.side.full(model), self.plain(self.model(), steps))

    def same_on_all(self, value: torch.Tensor) -> str:
        """Return "" if a plain tensor is the same on all ranks."""
        each = [torch.empty_like(value) for _ in range(self.world)]
        dist.all_gather(each, value.contiguous())
        return "" if all(torch.equal(each[0], other) for other in each) else "the ranks differ"


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def flat(values: Full) -> torch.Tensor:
    return torch.cat([value.flatten() for value in values.values()])


def differences(values: Full, expected: Full) -> str:
    """Return the faults of values that should be `expected`; "" if there are none."""
    if values.keys() != expected.keys():
        return f"other names: {sorted(values.keys() ^ expected.keys())}"
    pairs = [(values[name], value) for name, value in expected.items()]
    if any(a.isnan().any() for a, _ in pairs):
        return "NaN in the parameters"
    same = [torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-6) for a, b in pairs]
    return "" if all(same) else "wrong parameters"
