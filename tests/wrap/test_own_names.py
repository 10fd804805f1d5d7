"""A model's names and FSDP's: of each public name of FSDP, the model's own attribute wins.

The model has the name as a child, parameter, buffer, method, property or value, some assigned after
FSDP(), and trains to DDP's bits, with FSDP's methods called as functions.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import COMBINATIONS, ddp, make
from torch import nn

import zshard
from zshard import FSDP
from zshard.units.units import class_of

NAMES = sorted({name for name in dir(FSDP) if not name.startswith("_")} - {*dir(nn.Module)})
WIDTH = 5


class Model(nn.Module):
    """Uses its attribute `name` in forward. `begin` and `end` set it: at the end of __init__() and
    once the model is wrapped."""

    name = "own"

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.begin()

    def begin(self): ...

    def end(self): ...

    def forward(self, x):
        x = torch.tanh(self.first(x))
        found = getattr(self, self.name)
        return (found(x) if callable(found) else x * found) * self.gain


class Around(nn.Module):
    """Two such models, as inner units."""

    def __init__(self, kind):
        super().__init__()
        self.parts = nn.ModuleList([kind(), kind()])

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


# --- what the name is: attributes of the model's class --------------------------------------------


def linear():
    return nn.Linear(WIDTH, WIDTH)


def twice(self, x):
    return 2 * x + self.first.bias


def setting(value: Callable[[], Any]) -> Callable[[nn.Module], None]:
    return lambda self: setattr(self, self.name, value())


def moves(self, x):
    """A forward that reads and assigns a buffer."""
    x = torch.tanh(self.first(x))
    setattr(self, self.name, 0.5 * getattr(self, self.name) + x.detach().mean(0))
    return x * getattr(self, self.name) * self.gain


def counts(self, x):
    """A forward that writes through a property's setter."""
    setattr(self, self.name, getattr(self, self.name) + 1)
    return torch.tanh(self.first(x)) * getattr(self, self.name) * self.gain


def forwards(self, name):
    """__getattr__ of a model that passes names on to a part of it."""
    try:
        return nn.Module.__getattr__(self, name)
    except AttributeError:
        return getattr(nn.Module.__getattr__(self, "first"), name)


def buffer(self):
    self.register_buffer(self.name, torch.full((WIDTH,), 0.5))


def frozen(self):
    self.register_parameter(self.name, nn.Parameter(torch.ones(WIDTH), requires_grad=False))


def late_child(self):
    self.add_module(self.name, nn.Linear(WIDTH, WIDTH).requires_grad_(False))
    with torch.no_grad():
        for param in getattr(self, self.name).parameters():
            param.fill_(0.25)


def late_method(self):
    setattr(class_of(self), self.name, twice)


def of_first(self):
    self.first.note = torch.full((WIDTH,), 3.0)


def kinds_of(name: str) -> dict[str, type[Model]]:
    """Return a class of models for each kind of attribute that the name can be."""
    kept = property(
        lambda self: vars(self).get("_kept", 1.0), lambda self, v: vars(self).update(_kept=v)
    )
    contents: dict[str, dict[str, Any]] = {
        "child": {"begin": setting(linear)},
        "parameter": {"begin": setting(lambda: nn.Parameter(torch.ones(WIDTH)))},
        "buffer": {"begin": buffer, "forward": moves},
        "method": {name: twice},
        "static method": {name: staticmethod(torch.relu)},
        "property": {name: property(lambda self: self.first.bias * 2)},
        "property with a setter": {name: kept, "forward": counts},
        "value": {"begin": setting(lambda: 0.5)},
        "value of the class": {name: 0.5},
        "name that it passes on": {
            "__getattr__": forwards,
            "begin": lambda self: setattr(self.first, name, torch.full((WIDTH,), 3.0)),
        },
        "later child": {"end": late_child},
        "later child by assignment": {"end": setting(lambda: nn.Identity())},
        "later parameter": {"end": frozen},
        "later buffer": {"end": buffer, "forward": moves},
        "later value": {"end": setting(lambda: 0.5)},
        "later function": {"end": setting(lambda: torch.relu)},
        "later method of the class": {"end": late_method},
    }
    return {
        kind: type("Model", (Model,), {"name": name, **own}) for kind, own in contents.items()
    }


KINDS = list(kinds_of("own"))


# --- training -------------------------------------------------------------------------------------


def train(model, no_sync, clip):
    """Two steps of two micro-batches each; return the losses and norms."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    for step in range(2):
        for micro in range(2):
            numbers = torch.Generator().manual_seed(10 * step + 2 * dist.get_rank() + micro)
            with contextlib.nullcontext() if micro else no_sync(model):
                loss = model(torch.randn(3, WIDTH, generator=numbers)).square().mean()
                loss.backward()
            losses.append(loss.detach())
        norms.append(clip(model, 1e9))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def trains_as_under_ddp(kind: str, names: list[str], inside: bool, combination) -> None:
    for name in names:
        cls = kinds_of(name)[kind]
        build = (lambda cls=cls: Around(cls)) if inside else cls
        plain, model = make(build), make(build)
        theirs = ddp(plain)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            strategy, transport = combination
            policy = {cls} if inside else {nn.Linear}
            FSDP(model, strategy=strategy, transport=transport, auto_wrap_policy=policy)
        for each in (plain, model):
            for part in each.parts if inside else [each]:
                part.end()
        expected = train(
            theirs,
            nn.parallel.DistributedDataParallel.no_sync,
            lambda m, most: nn.utils.clip_grad_norm_(m.parameters(), most),
        )
        found = train(model, FSDP.no_sync, FSDP.clip_grad_norm_)
        what = f"{name} as a {kind}"
        assert_same(found[0], expected[0], f"the losses with {what}")
        torch.testing.assert_close(found[1], expected[1])
        assert_same(model.state_dict(), plain.state_dict(), f"the state with {what}")
        other = copy.deepcopy(model)
        assert_same(other.state_dict(), plain.state_dict(), f"a copy with {what}")
        assert FSDP.memory(model)["total"] > 0 and transport in FSDP.summary(model)


@pytest.mark.sampled(len(KINDS))
@pytest.mark.parametrize("combination", COMBINATIONS, ids=" ".join)
@pytest.mark.parametrize("inside", [False, True], ids=["root", "inner units"])
@pytest.mark.parametrize("first", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_a_models_own_attribute_wins(pool2, kind, first, inside, combination):
    pool2.run(trains_as_under_ddp, kind, NAMES[first::6], inside, combination)
