"""Rows S: a rank that dies, raises, is late or computes something else; unusual steps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.failures.job import BAD, STEPS, Job, differences, loss_of


def at(job: Job, place: str, fault: str) -> str:
    """Train until the last rank fails."""
    return job.train(faults={place: getattr(job, fault)})


def caught(job: Job, place: str) -> str:
    """As `at`, but the script catches the exception and continues with the next batch."""
    model = job.wrap(job.model())
    optimizer = job.sgd(model)
    job.faults = {place: job.fail}
    for number in range(STEPS):
        with contextlib.suppress(LookupError):
            job.step(model, optimizer, number)
    return differences(job.side.full(model), job.plain(job.model()))


def killed_before(job: Job) -> str:
    if job.last:
        job.kill()
    return job.train()


class Branches(nn.Module):
    """Two layers of equal shapes, of which each rank uses what its batch asks for."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.skips = nn.Linear(32, 32), nn.Linear(32, 32), skips

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        usual = bool(x[0, 0] > 0)
        if self.skips:
            out: torch.Tensor = self.a(x)
            return out if usual else self.b(out)
        out = (self.a if usual else self.b)(x)
        return out


class Branching(Job):
    """A job whose ranks take different branches in step BAD."""

    def batch(self, step: int, rank: int | None = None) -> torch.Tensor:
        batch = super().batch(step, rank)
        odd = step == BAD and (self.rank if rank is None else rank) == 1
        batch[0, 0] = -1 if odd else 1
        return batch


def branches(job: Job, kind: str) -> str:
    job.__class__ = Branching
    job.options = job.side.unused
    return job.train(lambda: Branches(kind == "unused"))


def fewer_batches(job: Job) -> str:
    model = job.wrap(job.model())
    optimizer = job.sgd(model)
    for number in range(BAD if job.last else STEPS):
        job.step(model, optimizer, number)
    if job.last:
        job.fault(victim=True)
    dist.barrier()
    return differences(job.side.full(model), job.plain(job.model()))


def joined(job: Job) -> str:
    model = job.wrap(job.model())
    optimizer = job.sgd(model)
    for number in job.side.joined(model, range(BAD if job.last else STEPS)):
        job.step(model, optimizer, number)
    return job.alike(torch.cat([v.flatten() for v in job.side.full(model).values()]))


class Poisoned(Job):
    """A job whose last rank has a NaN in a batch."""

    def batch(self, step: int, rank: int | None = None) -> torch.Tensor:
        batch = super().batch(step, rank)
        if step == BAD and rank is None and self.last:
            self.fault()
            batch[0, 0] = float("nan")
        return batch


def nan(job: Job) -> str:
    job.__class__ = Poisoned
    job.options = job.side.checks
    return job.train()


class Infinite(torch.autograd.Function):
    """The identity, whose gradient is infinite in its last element."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad[-1] = float("inf")
        return grad


class Offset(nn.Module):
    """Adds a parameter, whose gradient overflows on demand."""

    overflows = False

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offset: torch.Tensor = self.offset
        return x + (Infinite.apply(offset) if self.overflows else offset)


def overflows(job: Job) -> str:
    torch.manual_seed(0)
    model = job.wrap(nn.Sequential(nn.Linear(32, 32), Offset()))
    optimizer, scaler = job.sgd(model), torch.amp.GradScaler("cpu", init_scale=1024)
    for number in range(BAD + 1):
        before = job.side.full(model)
        optimizer.zero_grad()
        job.side.inner(model)[1].overflows = job.last and number == BAD
        scaler.scale(loss_of(model(job.batch(number)))).backward()
        scaler.step(optimizer)
        scaler.update()
    scales = job.alike(torch.tensor(scaler.get_scale()))
    return differences(job.side.full(model), before) or scales


class Weighted(nn.Module):
    """A layer that writes to its weight in forward, or keeps a view of it."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.writes = nn.Linear(32, 32), writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            with torch.no_grad():
                self.inner.weight.mul_(0.5)
        self.kept = self.inner.weight.data.view(-1)
        out: torch.Tensor = self.inner(x)
        return out


@torch.no_grad()
def written(job: Job) -> str:
    model, plain = (nn.Sequential(Weighted(True)) for _ in range(2))
    model = job.wrap(model)
    job.fault()
    for each in (model, plain):
        each(job.batch(0))
    return differences(job.side.full(model), dict(plain.state_dict()))


def view_kept(job: Job) -> str:
    model = job.wrap(nn.Sequential(Weighted(False)))
    model(job.batch(0))
    job.fault()
    kept = job.side.inner(model)[0].kept.sum()
    full = next(iter(job.side.full(model).values()))
    return "" if torch.isclose(kept, full.sum()) else "wrong values"


def gradients(job: Job, how: str) -> str:
    """Compare the gradients of an unusual backward with the plain model's."""
    model, plain = job.wrap(job.model()), job.model()
    job.fault()
    for each in (model, plain):
        inner, batch = job.side.inner(each), job.batch(0, 0)
        if how == "layers":
            loss = loss_of(inner[4](inner[2](inner[0](batch))))
        elif how == "recomputed":
            loss = loss_of(checkpoint(each, batch, use_reentrant=False))
        else:
            loss = loss_of(each(batch))
        if how == "penalty":
            loss = loss + inner[0].weight.norm()
        loss.backward(retain_graph=how == "twice")
        if how == "twice":
            loss.backward()
    found = {n: job.side.value(p.grad) for n, p in job.side.inner(model).named_parameters()}
    return differences(found, {n: p.grad for n, p in plain.named_parameters()})


def freezes(job: Job, who: str) -> str:
    model, plain = job.wrap(job.model()), job.model()
    optimizer, theirs = job.sgd(model), job.sgd(plain)
    for number in range(STEPS):
        if number == BAD and (who == "all" or job.last):
            job.fault()
            job.side.inner(model)[4].requires_grad_(False)
        plain[4].requires_grad_(number < BAD)
        job.step(model, optimizer, number)
        job.plain_step(plain, theirs, number)
    return differences(job.side.full(model), dict(plain.state_dict()))


def clipped(job: Job) -> str:
    found = [job.train(clip=order, steps=2) for order in (1.0, 2.0, float("inf"))]
    return next(filter(None, found), "")


def repeated(job: Job) -> str:
    first, second = (job.side.full(job.trained()[0]) for _ in range(2))
    return "" if all(torch.equal(a, second[name]) for name, a in first.items()) else "other bits"


def flipped(job: Job) -> str:
    model = job.side.replicated(job.model())
    optimizer = job.sgd(model)
    own = [getattr(p, "_local_tensor", p).detach() for p in model.parameters()]
    for number in range(STEPS):
        if number == BAD and job.last:
            own[0].view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)
        job.step(model, optimizer, number)
    return job.alike(torch.cat([p.flatten() for p in own]))


def interrupted(job: Job) -> str:
    def interrupt() -> None:
        time.sleep(1)
        (job.folder / "fault").unlink()
        job.fault()
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # also in a run in the background
    if not job.last:
        threading.Timer(0, interrupt).start()
    return job.train(faults={"forward": job.sleep})
