"""Rows W: models that differ between ranks, unusual parameters, and changes after wrapping."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.failures.job import STEPS, Job, differences


def seeds_differ(job: Job) -> str:
    model = job.wrap(job.model(seed=job.rank))
    return differences(job.side.full(model), dict(job.model(seed=0).state_dict()))


class Named(nn.Module):
    """Two layers of other shapes, registered in an order of choice."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(32, 32, bias=name == "a"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.a(x))
        return out


def frozen(odd: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[0].requires_grad_(not odd)
    return model


DIFFERING: dict[str, Callable[[bool], nn.Module]] = {
    "shape": lambda odd: nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 40 if odd else 48)),
    "dtype": lambda odd: frozen(False).to(torch.bfloat16 if odd else torch.float32),
    "count": lambda odd: nn.Sequential(*[nn.Linear(32, 32) for _ in range(3 if odd else 2)]),
    "order": lambda odd: Named("ba" if odd else "ab"),
    "frozen": frozen,
}


def differs(job: Job, what: str) -> str:
    """Train a model that the last rank makes otherwise."""
    job.fault()
    model = job.wrap(DIFFERING[what](job.last))
    optimizer = job.sgd(model)
    for number in range(2):
        optimizer.zero_grad()
        model(job.batch(number).to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()
    return "trains models that differ"


def optimizer_first(job: Job) -> str:
    model = job.model()
    optimizer = job.sgd(model)
    wrapped = job.wrap(model)
    for number in range(STEPS):
        job.step(wrapped, optimizer, number)
    return differences(job.side.full(wrapped), job.plain(job.model()))


class Odd(nn.Module):
    """A layer with one parameter of an unusual kind."""

    def __init__(self, extra: torch.Tensor) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)
        self.extra = nn.Parameter(extra)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra = self.extra.real if self.extra.is_complex() else self.extra.float()
        out: torch.Tensor = self.inner(x)
        return out @ extra if extra.dim() == 2 else out + extra.sum()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.a(x).tanh())
        return out


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 32, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table((10 * x[:, 0]).long() % 40)


UNUSUAL: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "sparse": Table,
    "scalar": lambda: Odd(torch.tensor(0.5)),
    "strided": lambda: Odd(torch.randn(32, 32).t()),
    "bfloat16": lambda: Odd(torch.ones(8, dtype=torch.bfloat16)),
    "complex": lambda: Odd(torch.ones(8, dtype=torch.complex64)),
    "empty": lambda: Odd(torch.ones(0)),
    "single": lambda: Odd(torch.ones(1)),
}


def unusual(job: Job, kind: str) -> str:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 32), UNUSUAL[kind]())

    return job.train(make)


def tied_across(job: Job) -> str:
    def make() -> nn.Module:
        model = job.model()
        model[4].weight = model[0].weight
        return model

    return job.train(make)


class Drawn(nn.Module):
    """A parameter that no reset_parameters() initializes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def meta(job: Job) -> str:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 32), Drawn())
    model = job.wrap(model)
    model.to_empty(device="cpu")
    model[0].reset_parameters()
    model(job.batch(0)).sum().backward()
    return "trains uninitialized values"


def twice(job: Job) -> str:
    return job.train(lambda: job.wrap(job.model()))


def buffers_differ(job: Job) -> str:
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))
    if job.last:
        model[1].running_mean.fill_(5)
    return job.alike(job.side.inner(job.wrap(model))[1].running_mean)


def added(model: nn.Sequential) -> None:
    model.append(nn.Linear(32, 32))


def replaced(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.randn(32, 32))


def changed(job: Job, how: str) -> str:
    """Train a model that the script changes after wrapping."""
    model, plain = job.wrap(job.model()), job.model()
    job.fault()
    for each in (job.side.inner(model), plain):
        torch.manual_seed(1)
        {"added": added, "replaced": replaced}[how](each)
    optimizer = job.sgd(model)
    for number in range(STEPS):
        job.step(model, optimizer, number)
    return differences(job.side.full(model), job.plain(plain))


def cast(job: Job) -> str:
    model = job.wrap(job.model())
    job.fault()
    model.double()
    optimizer = job.sgd(model)
    model(job.batch(0).double()).sum().backward()
    optimizer.step()
    return ""


def copied(job: Job) -> str:
    model, _ = job.trained(2)
    average = copy.deepcopy(model)
    with torch.no_grad():
        for mean, param in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(param, 0.5)
    return differences(job.side.full(average), job.plain(job.model(), 2))


def pickled(job: Job) -> str:
    model, _ = job.trained(2)
    job.fault()
    other = pickle.loads(pickle.dumps(model))
    return differences(job.side.full(other), job.plain(job.model(), 2))
