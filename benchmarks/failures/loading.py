"""Rows L, X and some of F: damaged, foreign and hostile checkpoints, and resumed runs."""

from __future__ import annotations

import itertools
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.failures.job import STEPS, Job, differences
from benchmarks.failures.saving import again


class Payload:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def harm(job: Job, how: str, path: Path) -> None:
    """Damage a file of a checkpoint."""
    data = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "flip":
        weight = job.plain(job.model())["4.weight"][24, :8].clone()
        at = data.index(weight.numpy().tobytes())
        data[at + 3] ^= 0x20
        path.write_bytes(data)
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "delete":
        path.unlink()
    elif how == "exchange":
        shutil.copy(job.folder / "earlier" / path.name, path)
    elif how == "add":
        shutil.copy(job.folder / "earlier" / path.name, path.parent / job.side.third)
    elif how == "pickle":
        path.write_bytes(pickle.dumps(Payload(job.folder / "trace")))


def harmed(job: Job, how: str, file: str = "data") -> str:
    """Save, harm a file, load into another model; return what is wrong with its values."""
    model, optimizer = job.trained(1)
    job.side.save(job.folder / "earlier", model, optimizer)
    for number in range(1, STEPS):
        job.step(model, optimizer, number)
    job.side.save(job.folder / "saved", model, optimizer)
    if job.rank == 0:
        harm(job, how, job.folder / "saved" / getattr(job.side, file))
    dist.barrier()
    job.fault()
    wrong, trace = "", job.folder / "trace"
    try:
        wrong = again(job)
    except BaseException:  # DCP's is no Exception
        if not trace.exists():
            raise
    return "the command runs" if trace.exists() else wrong


def linears(*widths: int) -> Callable[[], nn.Module]:
    pairs = list(itertools.pairwise(widths))
    return lambda: nn.Sequential(*[nn.Linear(a, b) for a, b in pairs])


class Counted(nn.Module):
    def __init__(self, count: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.register_buffer("count", count)


MISFITS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "shape": (linears(32, 32, 16), linears(32, 32, 8)),
    "dtype": (lambda: Counted(torch.tensor([1.5])), lambda: Counted(torch.tensor([1]))),
    "less": (linears(32, 32), linears(32, 32, 8)),
    "more": (linears(32, 32, 8), linears(32, 32)),
}


def misfit(job: Job, what: str) -> str:
    """Save one model and load its checkpoint into another one, which it does not fit."""
    saved, other = (job.wrap(make()) for make in MISFITS[what])
    job.side.save(job.folder / "saved", saved, torch.optim.SGD(saved.parameters(), lr=0.1))
    job.fault()
    job.side.load(job.folder / "saved", other, torch.optim.SGD(other.parameters(), lr=0.1))
    return "loads"


def saves(job: Job) -> None:
    job.side.save(job.folder / "saved", *job.trained())


def other_optimizer(job: Job) -> str:
    model, optimizer = job.trained()
    job.side.save(job.folder / "saved", model, optimizer)
    adam = torch.optim.AdamW(model.parameters())
    job.fault()
    job.side.load(job.folder / "saved", model, adam)
    job.step(model, adam, STEPS)
    return "the moments are lost"


def unreadable(job: Job) -> str:
    job.side.save(job.folder / "saved", *job.trained())
    if job.last:
        job.fault()
        job.folder /= "elsewhere"
    return again(job)


class Renamed(torch.optim.SGD):
    """A wrapper of an optimizer, whose load_state_dict has another name for its argument."""

    def load_state_dict(self, states: dict[str, Any]) -> None:  # type: ignore[override]
        super().load_state_dict(states)


def resumes(job: Job, kind: str) -> str:
    """Train, save, load and train on."""
    create = {"SGD": torch.optim.SGD, "Renamed": Renamed}[kind]
    model, optimizer = None, None
    for begin in (0, 2):
        model = job.wrap(job.model(seed=begin))
        optimizer = create(model.parameters(), lr=0.1, momentum=0.9)
        if begin:
            job.side.load(job.folder / "saved", model, optimizer)
        for number in (begin, begin + 1):
            job.step(model, optimizer, number)
        if not begin:
            job.side.save(job.folder / "saved", model, optimizer)
    assert model is not None
    return differences(job.side.full(model), job.plain(job.model()))
