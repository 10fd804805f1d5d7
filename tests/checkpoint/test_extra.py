"""extra= of zshard.save(): types come back exactly, or are refused at the save, by name."""

from __future__ import annotations

import collections
import enum
import types
from collections import Counter, OrderedDict, defaultdict, deque

import numpy
import pytest
import torch
from models import Mlp, wrapped
from optim_states import FULL
from scenarios import message_of
from spawn import on_ranks
from torch import nn
from torch.optim import lr_scheduler

import zshard

Pair = collections.namedtuple("Pair", "x y")

TYPES = {
    "counter": Counter({2: 1, "a": 3}),
    "ordered": OrderedDict(b=1, a=[OrderedDict()]),
    "of lists": defaultdict(list, {(1, 2): [3]}),
    "of nothing": defaultdict(None, {"a": 1}),
    "deque": deque([1, (2,)], maxlen=3),
    "size": torch.Size([2, 3]),
    "parameter": nn.Parameter(torch.ones(2)),
    "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
    "np.float32": numpy.float32(0.1),
    "np.float64": numpy.float64(0.1),
    "np.longdouble": numpy.longdouble("0.1"),
    "np.int64": numpy.int64(-3),
    "np.bool": numpy.bool_(True),
    "keys": {numpy.int64(1): 2, float("inf"): 3, None: 4},
    "bytes": [b"a", bytearray(b"b")],
    "sets": ({1, 2}, frozenset({"a"})),
}

REFUSED = {
    "a named tuple": (Pair(1, 2), "Pair"),
    "a masked array": (numpy.ma.array([1, 2], mask=[0, 1]), "MaskedArray"),
    "a defaultdict of a function": (defaultdict(lambda: 1), "defaultdict"),
    "an enum": (enum.IntEnum("Color", "RED").RED, "Color"),
    "a string of NumPy": (numpy.str_("a"), "str_"),
    "a dict of a class": (type("Own", (dict,), {})(a=1), "Own"),
    "a view of a dict": (types.MappingProxyType({"a": 1}), "mappingproxy"),
    "a list of a class": (type("Rows", (list,), {})([1]), "Rows"),
    "a tensor of a class": (torch.ones(2).as_subclass(type("My", (torch.Tensor,), {})), "My"),
    "complex": (1j, "complex"),
}


def same(ours, theirs):
    """Return whether two values have the same types and contents, in the same order."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, dict):
        pairs = zip(ours.items(), theirs.items(), strict=True)
        return len(ours) == len(theirs) and all(same(*pair) for pair in pairs)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs) and ours.requires_grad == theirs.requires_grad
    if isinstance(ours, deque | defaultdict):
        return repr(ours) == repr(theirs)
    return bool(ours == theirs)


@pytest.mark.parametrize("what", TYPES)
def test_types_come_back_exactly(what, tmp_path):
    model = nn.Linear(2, 2)
    zshard.save(tmp_path / "x", model, extra={"it": [TYPES[what]]})
    found = zshard.load(tmp_path / "x", model)["it"][0]
    assert same(found, TYPES[what]), found
    if what.startswith("of "):
        assert found.default_factory is TYPES[what].default_factory
    assert getattr(found, "maxlen", None) == getattr(TYPES[what], "maxlen", None)


@pytest.mark.parametrize("what", REFUSED)
def test_types_that_would_not_are_refused(what, tmp_path):
    value, name = REFUSED[what]
    save = lambda: zshard.save(tmp_path / "x", nn.Linear(2, 2), extra={"it": [value]})  # noqa: E731
    text = message_of(save, TypeError)
    assert "extra['it'][0]" in text and name in text
    assert list(tmp_path.iterdir()) == []


@on_ranks(2)
def test_shards_in_extra_are_refused(tmp_path):
    model = wrapped(Mlp, FULL)
    found = []
    for value in (model.first.weight, model.first.weight.detach() * 2):
        save = lambda v=value: zshard.save(tmp_path / "x", model, extra={"it": v})  # noqa: E731
        found.append(message_of(save, TypeError))
    assert all("extra['it']" in text and "full_tensor()" in text for text in found)


def schedule(steps, folder=None):
    """Return the rates of a schedule with a MultiStepLR in it, after two steps."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    second = lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.1)
    scheduler = lr_scheduler.SequentialLR(optimizer, [first, second], milestones=[3])
    if folder is not None and folder.exists():
        scheduler.load_state_dict(zshard.load(folder, model, optimizer)["scheduler"])
    rates = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    if folder is not None and not folder.exists():
        zshard.save(folder, model, optimizer, extra={"scheduler": scheduler.state_dict()})
    return rates


def test_schedule_of_schedules_continues(tmp_path):
    rates = schedule(2, tmp_path / "x") + schedule(6, tmp_path / "x")
    assert rates == schedule(8)
