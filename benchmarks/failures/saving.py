"""Rows V and some of F: saves that are killed, fail, overlap or leave something out.

A full disk is a limit of one process's file size (RLIMIT_FSIZE): the kernel refuses a write, or
kills the process at it.
"""

from __future__ import annotations

import contextlib
import copy
import os
import resource
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.failures.job import Job, differences

ROOM = 4096
"""Bytes of a file on the full disk: less than any rank writes."""


def filled(job: Job, value: float = 1) -> tuple[nn.Module, Any]:
    """Return a model whose parameters all have this value, and its optimizer."""
    model, optimizer = job.trained(1)
    fill(model, value)
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


def loads(job: Job, folder: Path, *values: float) -> str:
    """Load into another model; return "" if all its parameters have one of these values."""
    model = job.wrap(job.model(seed=9))
    job.side.load(folder, model, job.sgd(model))
    found = torch.cat([value.flatten() for value in job.side.full(model).values()])
    if any(torch.equal(found, torch.full_like(found, value)) for value in values):
        return ""
    return "half old, half new" if all(v in found for v in values) else "other values"


def killed(job: Job, when: str) -> str:
    """Kill a rank in a save: its first one, the next one, or one over the first."""
    model, optimizer = filled(job, 1)
    if when != "first":
        job.side.save(job.folder / ("saved" if when == "over" else "first"), model, optimizer)
    fill(model, 2)
    fill_disk(job, kill=True)
    job.side.save(job.folder / "saved", model, optimizer, overwrite=when == "over")
    return "nothing was killed"


def old_or_new(job: Job) -> str:
    return loads(job, job.folder / "saved", 1, 2)


def full_disk(job: Job) -> str:
    model, optimizer = filled(job)
    fill_disk(job, kill=False)
    job.side.save(job.folder / "saved", model, optimizer)
    return "the save does not fail"


def saves_again(job: Job) -> str:
    model, optimizer = job.trained(2)
    fill_disk(job, kill=False)
    with contextlib.suppress(BaseException):
        job.side.save(job.folder / "saved", model, optimizer)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    for number in (2, 3):
        job.step(model, optimizer, number)
    job.side.save(job.folder / "saved", model, optimizer)
    return again(job)


def again(job: Job) -> str:
    """Load into another model; return what is wrong with its parameters after all steps."""
    model = job.wrap(job.model(seed=9))
    job.side.load(job.folder / "saved", model, job.sgd(model))
    return differences(job.side.full(model), job.plain(job.model()))


def exists(job: Job) -> str:
    model, optimizer = filled(job)
    job.side.save(job.folder / "saved", model, optimizer)
    job.fault()
    job.side.save(job.folder / "saved", model, optimizer)
    return "the first one is replaced"


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
        for number in (2, 3):
            job.step(model, optimizer, number)
    elif what != "ends":
        for wait in waits:
            wait()
    return loads(job, job.folder / "second", 2) if what == "second" else ""


def finished(job: Job) -> str:
    try:
        return loads(job, job.folder / "saved", 1)
    except BaseException as error:  # DCP's is no Exception
        return f"exit status 0, and no checkpoint ({type(error).__name__})"


def other_names(job: Job) -> str:
    model, optimizer = filled(job)
    job.fault()
    job.side.save(job.folder / f"step-{job.rank}", model, optimizer)
    return loads(job, job.folder / "step-0", 1)


def other_entries(job: Job) -> str:
    model, optimizer = filled(job)
    if job.last:
        job.fault()
        job.side.inner(model).register_buffer("count", torch.ones(3))
    job.side.save(job.folder / "saved", model, optimizer)
    return "" if job.rank == 0 else "the entry is not saved"


def not_shared(job: Job) -> str:
    host = job.folder / f"host{job.rank}"
    host.mkdir()
    os.chdir(host)
    here = Path("/proc/self/cwd/saved")  # one name, a folder for each rank
    model, optimizer = filled(job)
    job.fault()
    job.side.save(here, model, optimizer)
    return loads(job, here, 1)


class Slow(nn.Linear):
    """A layer whose state takes rank 0 longer than the timeout."""

    job: Job

    def get_extra_state(self) -> torch.Tensor:
        if self.job.rank == 0:
            self.job.sleep()
        return torch.zeros(1)

    def set_extra_state(self, state: Any) -> None:
        pass


def slow_save(job: Job) -> str:
    model = job.wrap(nn.Sequential(Slow(32, 32), nn.Linear(32, 32)))
    job.side.inner(model)[0].job = job
    job.side.save(job.folder / "saved", model, job.sgd(model))
    return ""


class Adapter(nn.Module):
    """A frozen layer with a small adapter that trains."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(32, 32).requires_grad_(False)
        self.down, self.up = nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def small(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))


def left_out(job: Job, what: str) -> str:
    """Save a model, load it into another one, and look for what is missing."""

    def make(seed: int) -> nn.Module:
        if what == "average":
            return job.wrap(small(seed))
        if what == "adapters":
            return job.wrap(nn.Sequential(Adapter(seed)))
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
