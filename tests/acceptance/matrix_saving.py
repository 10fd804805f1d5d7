"""Scripts of the failure matrix that save and load: saves that are killed, fail, overlap or leave
something out; damaged, foreign and hostile checkpoints; resumed runs.

A full disk is a limit of one process's file size (RLIMIT_FSIZE): the kernel refuses a write, or
kills the process at it.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matrix_job import STEPS, Job, Net, differences, flat, linear
from torch import nn

ROOM = 4096
"""Bytes of a file on the full disk: less than any rank writes."""


# --- saves ----------------------------------------------------------------------------------------


def filled(job: Job) -> tuple[nn.Module, Any]:
    """Return a model whose parameters are all 1, and its optimizer."""
    model, optimizer = job.trained(1)
    fill(model, 1)
    return model, optimizer


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)


def fill_disk(job: Job, kill: bool) -> None:
    """From now on, files of the rank that writes last hold ROOM bytes."""
    if job.rank == job.side.writer:
        job.fault(victim=kill)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if kill else signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, most))


def other(job: Job, folder: Path) -> nn.Module:
    """Load into another model."""
    model, optimizer = job.wrapped(job.model(seed=9))
    job.side.load(folder, model, optimizer)
    return model


def loads(job: Job, *values: Any, folder: str = "saved") -> str:
    """Load into another model; return "" if all its parameters have one of these values."""
    full = flat(job.side.full(other(job, job.folder / folder)))
    if any(torch.equal(full, torch.full_like(full, float(value))) for value in values):
        return ""
    return "half old, half new" if all(float(v) in full for v in values) else "other values"


def again(job: Job) -> str:
    """Load into another model; return the faults of its parameters after all steps."""
    return job.wrong(other(job, job.folder / "saved"))


WRONG = {
    "exists": "the first one is replaced",
    "entries": "the entry is not saved",
    "full": "the save does not fail",
}


def saves(job: Job, what: str) -> str:
    """Save ones, with a fault.

    "first", "later" and "over": a rank is killed in its first save, the next, or one over the first.
    """
    model, optimizer = filled(job)
    folder = job.folder / "saved"
    if what in ("exists", "over", "later"):
        job.side.save(job.folder / "first" if what == "later" else folder, model, optimizer)
    if what in ("first", "over", "later", "full"):
        fill(model, 2)
        fill_disk(job, kill=what != "full")
    elif what == "entries" and job.last:
        job.side.inner(model).register_buffer("count", torch.ones(3))
    elif what == "names":
        folder = job.folder / f"step-{job.rank}"
    elif what == "hosts":
        job.folder /= f"host{job.rank}"
        job.folder.mkdir()
        os.chdir(job.folder)
        folder = Path("/proc/self/cwd/saved")  # one name, a folder for each rank
    if what != "hosts":
        job.fault()
    job.side.save(folder, model, optimizer, overwrite=what == "over")
    if what in ("names", "hosts"):
        return loads(job, 1, folder="step-0" if what == "names" else "saved")
    return "" if what == "entries" and job.rank == 0 else WRONG.get(what, "nothing was killed")


def saves_again(job: Job) -> str:
    model, optimizer = job.trained(2)
    fill_disk(job, kill=False)
    with contextlib.suppress(BaseException):
        job.side.save(job.folder / "saved", model, optimizer)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    job.steps(model, optimizer, (2, 3))
    job.side.save(job.folder / "saved", model, optimizer)
    return again(job)


def in_background(job: Job, what: str) -> str:
    """Do something during a save in the background, and do not ask for its result if it fails."""
    model, optimizer = filled(job)
    if what == "fails":
        fill_disk(job, kill=False)
    waits = [job.side.save_later(job.folder / "saved", model, optimizer)]
    fill(model, 2)
    if what == "second":
        waits.append(job.side.save_later(job.folder / "second", model, optimizer))
    if what == "fails":
        job.steps(model, optimizer, (2, 3))
    elif what != "ends":
        for wait in waits:
            wait()
    return loads(job, 2, folder="second") if what == "second" else ""


def finished(job: Job) -> str:
    try:
        return loads(job, 1)
    except BaseException as error:  # DCP's is no Exception
        return f"exit status 0, and no checkpoint ({type(error).__name__})"


class Slow(nn.Linear):
    """A layer whose state takes rank 0 longer than the timeout."""

    job: Job

    def get_extra_state(self) -> torch.Tensor:
        if self.job.rank == 0:
            self.job.do("sleep")
        return torch.zeros(1)

    def set_extra_state(self, state: Any) -> None:
        pass


def slow_save(job: Job) -> str:
    model, optimizer = job.wrapped(nn.Sequential(Slow(32, 32), linear()))
    job.side.inner(model)[0].job = job
    job.side.save(job.folder / "saved", model, optimizer)
    return ""


def adapter() -> nn.Module:
    """A frozen layer with a small adapter that trains."""
    parts = {"base": linear().requires_grad_(False), "down": linear(2), "up": nn.Linear(2, 32)}
    return Net(lambda m, x: m.base(x) + m.up(m.down(x)), **parts)


def left_out(job: Job, what: str) -> str:
    """Save a model, load it into another one, and look for missing values."""

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        if what == "average":
            return job.wrap(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1)))
        if what == "adapters":
            return job.wrap(nn.Sequential(adapter()))
        plain = job.model(seed)
        return job.wrap(plain, **{job.side.ignoring: set(plain[4].parameters())})

    model, other = make(0), make(1)
    if what == "average":
        job.fault()
        model = copy.deepcopy(model)
    expected = job.side.full(model)
    job.side.save(job.folder / "saved", model, job.sgd(model))
    job.side.load(job.folder / "saved", other, job.sgd(other))
    return differences(job.side.full(other), expected)


# --- loads ----------------------------------------------------------------------------------------


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
    """Save, harm a file, load into another model; return the faults of its values."""
    model, optimizer = job.trained(1)
    job.side.save(job.folder / "earlier", model, optimizer)
    job.steps(model, optimizer, range(1, STEPS))
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


def counted(count: torch.Tensor) -> nn.Module:
    model = Net(lambda m, x: m.layer(x), layer=linear())
    model.register_buffer("count", count)
    return model


def stack(*widths: int) -> nn.Module:
    return nn.Sequential(*map(linear, widths))


MISFITS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "shape": (lambda: stack(32, 16), lambda: stack(32, 8)),
    "dtype": (lambda: counted(torch.tensor([1.5])), lambda: counted(torch.tensor([1]))),
    "less": (lambda: stack(32), lambda: stack(32, 8)),
    "more": (lambda: stack(32, 8), lambda: stack(32)),
}


def misfit(job: Job, what: str) -> str:
    """Save one model and load its checkpoint into another one, which it does not fit."""
    saved, model = (job.wrap(make()) for make in MISFITS[what])
    job.side.save(job.folder / "saved", saved, torch.optim.SGD(saved.parameters()))
    job.fault()
    job.side.load(job.folder / "saved", model, torch.optim.SGD(model.parameters()))
    return "loads"


def trains_and_saves(job: Job) -> None:
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
    trains_and_saves(job)
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

    def part(begin: int) -> tuple[nn.Module, Any]:
        model = job.wrap(job.model(seed=begin))
        optimizer = create(model.parameters(), lr=0.1, momentum=0.9)
        if begin:
            job.side.load(job.folder / "saved", model, optimizer)
        job.steps(model, optimizer, (begin, begin + 1))
        return model, optimizer

    job.side.save(job.folder / "saved", *part(0))
    return job.wrong(part(2)[0])
