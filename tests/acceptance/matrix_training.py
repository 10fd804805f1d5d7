"""Scripts of the failure matrix that train: models that differ or are unusual, steps that fail, one
rank alone, calls that do not match, and wrong environments.

A script returns the fault that it finds, "" if there is none.
"""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from matrix_job import BAD, STEPS, WIDTH, Job, Net, differences, flat, linear, loss_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

# --- models ---------------------------------------------------------------------------------------


def seeds_differ(job: Job) -> str:
    return job.wrong(job.wrap(job.model(seed=job.rank)), 0)


DIFFERING: dict[str, Callable[[bool], nn.Module]] = {
    "shape": lambda odd: nn.Sequential(linear(), linear(40 if odd else 48)),
    "dtype": lambda odd: nn.Sequential(linear(), linear()).to(
        torch.bfloat16 if odd else torch.float32
    ),
    "count": lambda odd: nn.Sequential(*[linear() for _ in range(3 if odd else 2)]),
    "order": lambda odd: Net(
        lambda m, x: m.b(m.a(x)), **{n: linear(bias=n == "a") for n in ("ba" if odd else "ab")}
    ),
    "frozen": lambda odd: nn.Sequential(linear().requires_grad_(not odd), linear()),
}


def differs(job: Job, what: str) -> str:
    """Train a model that the last rank makes otherwise."""
    job.fault()
    model, optimizer = job.wrapped(DIFFERING[what](job.last))
    for number in range(2):
        optimizer.zero_grad()
        loss_of(model(job.batch(number).to(next(model.parameters()).dtype))).backward()
        optimizer.step()
    return "trains models that differ"


def odd(extra: torch.Tensor) -> nn.Module:
    """A layer with one parameter of an unusual kind."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        extra = m.extra.real if m.extra.is_complex() else m.extra.float()
        return m.inner(x) @ extra if extra.dim() == 2 else m.inner(x) + extra.sum()

    return Net(forward, inner=linear(), extra=extra)


def tied() -> nn.Module:
    model = Net(lambda m, x: m.b(m.a(x).tanh()), a=linear(), b=linear())
    model.b.weight = model.a.weight
    return model


def table() -> nn.Module:
    rows = nn.Embedding(40, WIDTH, sparse=True)
    return Net(lambda m, x: x + m.rows((10 * x[:, 0]).long() % 40), rows=rows)


UNUSUAL: dict[str, Callable[[], nn.Module]] = {
    "tied": tied,
    "sparse": table,
    "scalar": lambda: odd(torch.tensor(0.5)),
    "strided": lambda: odd(torch.randn(WIDTH, WIDTH).t()),
    "bfloat16": lambda: odd(torch.ones(8, dtype=torch.bfloat16)),
    "complex": lambda: odd(torch.ones(8, dtype=torch.complex64)),
    "empty": lambda: odd(torch.ones(0)),
    "single": lambda: odd(torch.ones(1)),
}


def unusual(job: Job, kind: str) -> str:
    def make() -> nn.Module:
        model = job.model()
        if kind == "wrapped":
            return job.wrap(model)
        if kind == "across":
            model[4].weight = model[0].weight
            return model
        return nn.Sequential(model[0], UNUSUAL[kind]())

    return job.train(make)


def meta(job: Job) -> str:
    """Train a parameter that no reset_parameters() initializes."""
    with torch.device("meta"):
        model = nn.Sequential(linear(), Net(lambda m, x: x * m.scale, scale=torch.ones(WIDTH)))
    wrapped = job.wrap(model)
    wrapped.to_empty(device="cpu")
    wrapped[0].reset_parameters()
    wrapped(job.batch(0)).sum().backward()
    return "trains uninitialized values"


def buffers_differ(job: Job) -> str:
    model = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH))
    if job.last:
        model[1].running_mean.fill_(5)
    return job.same_on_all(job.side.inner(job.wrap(model))[1].running_mean)


def changed(job: Job, how: str) -> str:
    """Train a model whose optimizer is created before wrapping, or which the script changes then."""
    model, plain = job.model(), job.model()
    optimizer = job.sgd(model)
    model = job.wrap(model)
    job.fault()
    for each in (job.side.inner(model), plain):
        torch.manual_seed(1)
        if how == "added":
            each.append(linear())
        elif how == "replaced":
            each[0].weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    if how != "early":
        optimizer = job.sgd(model.double() if how == "cast" else model)
    if how == "cast":
        model(job.batch(0).double()).sum().backward()
        optimizer.step()
        return ""
    job.steps(model, optimizer, range(STEPS))
    return differences(job.side.full(model), job.plain(plain))


def copied(job: Job, how: str) -> str:
    model, _ = job.trained(2)
    job.fault()
    if how == "pickled":
        return job.wrong(pickle.loads(pickle.dumps(model)), 2)
    average = copy.deepcopy(model)
    with torch.no_grad():
        for mean, param in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(param, 0.5)
    return job.wrong(average, 2)


# --- steps ----------------------------------------------------------------------------------------


def at(job: Job, place: str, fault: str, caught: str = "") -> str:
    """Train until the last rank fails. caught: the script continues with the next batch."""
    job.place, job.planned = place, fault
    job.caught = (LookupError,) if caught else ()
    job.number = BAD
    job.at("before")
    return job.train()


def branches(job: Job, kind: str) -> str:
    """Train two layers of equal shapes: each rank uses what its batch asks for."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        usual = bool(x[0, 0] > 0)
        if kind == "unused":
            return m.a(x) if usual else m.b(m.a(x))
        return (m.a if usual else m.b)(x)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Net(forward, a=linear(), b=linear())

    def edit(batch: torch.Tensor, step: int, rank: int | None) -> None:
        is_odd = step == BAD and (job.rank if rank is None else rank) == 1
        batch[0, 0] = -1 if is_odd else 1

    job.edit, job.options = edit, job.side.unused
    return job.train(make)


def fewer_batches(job: Job, where: str) -> str:
    """Train where the last rank has fewer batches, then wait in a barrier; or in join()."""
    (model, optimizer), numbers = job.wrapped(), range(BAD if job.last else STEPS)
    if where == "join":
        job.steps(model, optimizer, job.side.joined(model, numbers))
        return job.same_on_all(flat(job.side.full(model)))
    job.steps(model, optimizer, numbers)
    if job.last:
        job.fault(victim=True)
    dist.barrier()
    return job.wrong(model)


def nan(job: Job) -> str:
    def edit(batch: torch.Tensor, step: int, rank: int | None) -> None:
        if step == BAD and rank is None and job.last:
            job.fault()
            batch[0, 0] = float("nan")

    job.edit, job.options = edit, job.side.checks
    return job.train()


def overflows(job: Job) -> str:
    def infinite(grad: torch.Tensor) -> torch.Tensor:
        return torch.cat([grad[:-1], torch.full_like(grad[-1:], float("inf"))])

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        offset = m.offset.clone()
        if m.overflows:
            offset.register_hook(infinite)
        return x + offset

    torch.manual_seed(0)
    offset = Net(forward, offset=torch.zeros(WIDTH), overflows=False)
    model, optimizer = job.wrapped(nn.Sequential(linear(), offset))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    for number in range(BAD + 1):
        before = job.side.full(model)
        optimizer.zero_grad()
        job.side.inner(model)[1].overflows = job.last and number == BAD
        scaler.scale(loss_of(model(job.batch(number)))).backward()
        scaler.step(optimizer)
        scaler.update()
    scales = job.same_on_all(torch.tensor(scaler.get_scale()))
    return differences(job.side.full(model), before) or scales


def weights(job: Job, how: str) -> str:
    """Write to a weight in a forward, or read a view of it that a forward has kept."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        if how == "written":
            with torch.no_grad():
                m.inner.weight.mul_(0.5)
        m.view = m.inner.weight.data.view(-1)
        return m.inner(x)

    plain = nn.Sequential(Net(forward, inner=linear()))
    model = job.wrap(copy.deepcopy(plain))
    with torch.no_grad():
        plain(job.batch(0))
        job.fault()
        model(job.batch(0))
    values = job.side.full(model)
    if how == "written":
        return differences(values, dict(plain.state_dict()))
    total = job.side.inner(model)[0].view.sum()
    return "" if torch.isclose(total, next(iter(values.values())).sum()) else "wrong values"


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
    grads = {n: job.side.value(p.grad) for n, p in job.side.inner(model).named_parameters()}
    return differences(grads, {n: p.grad for n, p in plain.named_parameters()})


def freezes(job: Job, who: str) -> str:
    (model, optimizer), plain = job.wrapped(), job.model()

    def edit(batch: torch.Tensor, step: int, rank: int | None) -> None:
        if rank is not None:
            plain[4].requires_grad_(step < BAD)
        elif step == BAD and (who == "all" or job.last):
            job.fault()
            job.side.inner(model)[4].requires_grad_(False)

    job.edit = edit
    job.steps(model, optimizer, range(STEPS))
    return differences(job.side.full(model), job.plain(plain))


def clipped(job: Job) -> str:
    wrong = [job.train(clip=order, steps=2) for order in (1.0, 2.0, float("inf"))]
    return next(filter(None, wrong), "")


def repeated(job: Job) -> str:
    first, second = (flat(job.side.full(job.trained()[0])) for _ in range(2))
    return "" if torch.equal(first, second) else "other bits"


def flipped(job: Job) -> str:
    model = job.side.replicated(job.model())
    optimizer = job.sgd(model)
    own = [getattr(p, "_local_tensor", p).detach() for p in model.parameters()]
    for number in range(STEPS):
        if number == BAD and job.last:
            own[0].view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)
        job.step(model, optimizer, number)
    return job.same_on_all(torch.cat([p.flatten() for p in own]))


def interrupted(job: Job) -> str:
    def interrupt() -> None:
        time.sleep(1)
        (job.folder / "fault").unlink()
        job.fault()
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # also in a run in the background
    if not job.last:
        threading.Timer(0, interrupt).start()
    return at(job, "forward", "sleep")


# --- one rank alone, and calls that do not match --------------------------------------------------


def do(job: Job, deed: str, model: nn.Module, optimizer: Any) -> None:
    """Do something that the other ranks do not."""
    if deed == "skip":
        own = optimizer.step
        optimizer.step = lambda: setattr(optimizer, "step", own)
    elif deed == "lr":
        optimizer.param_groups[0].update(lr=0.05)
    elif deed == "load":
        job.side.inner(model).load_state_dict(job.model(seed=5).state_dict())
    elif deed == "write":
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
    elif deed == "evaluate":
        with torch.no_grad():
            model(job.batch(9))
    elif deed == "state":
        job.side.full(model)
    elif deed == "backward":
        loss_of(model(job.batch(9))).backward()


def alone(job: Job, rank: str, deed: str) -> str:
    """Train while one rank does something before step BAD."""
    model, optimizer = job.wrapped()
    for number in range(STEPS):
        if number == BAD and job.rank == int(rank):
            job.fault()
            do(job, deed, model, optimizer)
        job.step(model, optimizer, number)
    full = job.side.full(model)
    return job.same_on_all(flat(full)) or differences(full, job.plain(job.model()))


def gathers(job: Job, *which: str) -> str:
    """Gather parameter which[rank] on each rank."""
    model = job.wrap(job.model())
    expected = list(job.model().parameters())
    params = list(job.side.inner(model).parameters())
    job.fault()
    mine = int(which[job.rank])
    return differences({"": job.side.value(params[mine])}, {"": expected[mine].detach()})


def other_calls(job: Job) -> str:
    model, _ = job.trained(1)
    job.fault()
    if job.last:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return ""
    return job.wrong(model, 1)


# --- environments ---------------------------------------------------------------------------------


def environment(job: Job, what: str) -> str:
    """Train where variables of the launcher are wrong, or where there is none."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    for name in names if what == "alone" else ():
        del os.environ[name]
    if what != "alone":
        os.environ.update({"world": {"WORLD_SIZE": "3"}, "rank": {"RANK": f"{job.rank + 2}"}}[what])
        job.fault()
        if what == "world":
            job.begin()
        job.side.begin(job.timeout)
    model, _ = job.trained()
    return differences(job.side.full(model), job.plain(job.model(), world=job.world))


def destroyed(job: Job) -> str:
    model, optimizer = job.wrapped()
    job.step(model, optimizer, 0)
    dist.barrier()
    job.fault()
    dist.destroy_process_group()
    job.step(model, optimizer, 1)
    return job.wrong(model, 2)


def forks(job: Job) -> str:
    model, optimizer = job.wrapped()
    batches = [job.batch(number) for number in range(STEPS)]
    for number, batch in enumerate(DataLoader(batches, batch_size=None, num_workers=2)):
        assert torch.equal(batch, batches[number])
        job.step(model, optimizer, number)
    return job.wrong(model)
