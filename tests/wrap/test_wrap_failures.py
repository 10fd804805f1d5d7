"""FSDP() fails on one rank: all ranks get the reason, and can try again."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from groups import own_group, passing_groups
from models import ddp, differences, loss_of, make
from scenarios import Stack, floats, units_made_by
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import zshard
from zshard import FSDP
from zshard.model import shard_model

TRANSPORTS = ("shm", "c10d")


def options(transport):
    return {"process_group": own_group(), "transport": transport, "timeout": 10}


def attempt(model, how):
    """Return the text of FSDP()'s error; None if it succeeds."""
    try:
        FSDP(model, **how)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def trains(model):
    loss_of(model(floats(dist.get_rank()))).backward()
    return all(p.grad is not None for p in model.parameters())


@passing_groups()
def with_a_strange_parameter(transport):
    """Rank 1's model has a parameter that cannot be sharded; all try again without."""
    model, how = make(Stack), options(transport)
    weight = model.head.weight
    if dist.get_rank() == 1:
        model.head.weight = nn.Parameter(torch.eye(2, 9).to_sparse())
    first = attempt(model, how)
    model.head.weight = weight
    return first, attempt(model, how), trains(model)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_unsupported_parameter_on_one_rank(pool2, transport):
    for first, second, trained in pool2.run(with_a_strange_parameter, transport):
        assert "head.weight" in first and "not a dense tensor" in first
        assert second is None and trained


def distributed(weight):
    mesh = init_device_mesh("cpu", (2,))
    return distribute_tensor(weight, mesh, [Shard(0)])


def fake(weight):
    return FakeTensorMode().from_tensor(weight)


class Doubled(TwoTensor):
    """Like torchao's quantized tensors: attributes hold its components."""


STRANGE = {
    "sparse": lambda weight: weight.to_sparse(),
    "sparse rows": lambda weight: weight.to_sparse_csr(),
    "negated": torch._neg_view,
    "DTensor": distributed,
    "FakeTensor": fake,
    "Doubled": lambda weight: Doubled(weight, weight.clone()),
}


@passing_groups()
def with_memory_elsewhere(kind, transport):
    model, how = make(Stack), options(transport)
    weight = model.head.weight
    strange = nn.Parameter(STRANGE[kind](weight.detach()), requires_grad=False)
    model.head.weight = strange
    first = attempt(model, how)
    kept = model.head.weight is strange
    model.head.weight = weight
    return first, kept, attempt(model, how), trains(model)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", STRANGE)
def test_parameters_without_memory_of_their_own(pool2, kind, transport):
    """The same on all ranks: an error that names parameter and class, where the core would read
    memory."""
    said = f"is of class {kind}" if kind[0].isupper() else "not a dense tensor"
    said, remedy = ("is a DTensor", "omit parallelize") if kind == "DTensor" else (said, "ignored_")
    for first, kept, second, trained in pool2.run(with_memory_elsewhere, kind, transport):
        assert "'head.weight'" in first and said in first and remedy in first
        assert kept and second is None and trained


@passing_groups()
def with_a_missing_directory(transport):
    """An offload directory is missing on all ranks: nothing has changed, and the next attempt works."""
    model, how = make(Stack), options(transport)
    first = attempt(model, {**how, "offload": zshard.Offload(directory="/nowhere/at/all")})
    return first, attempt(model, how), trains(model)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_failure_before_any_change(pool2, transport):
    for first, second, trained in pool2.run(with_a_missing_directory, transport):
        assert "/nowhere/at/all" in first
        assert second is None and trained


def no_memory(*args):
    raise MemoryError("planted")


@contextlib.contextmanager
def without_an_engine():
    """Rank 1 cannot make the C part of a model."""
    usual = shard_model.make_engine
    if dist.get_rank() == 1:
        shard_model.make_engine = no_memory
    yield
    shard_model.make_engine = usual


def without_a_unit():
    """Rank 1 cannot make its second unit."""
    made = []

    def make_unit(usual, *args):
        made.append(args)
        failed = dist.get_rank() == 1 and len(made) == 2
        return no_memory() if failed else usual(*args)

    return units_made_by(make_unit)


@passing_groups()
def with_a_part_on_one_rank(transport, without):
    """Rank 1 fails to make a part of a model, which rank 0 makes; then all train another model."""
    how = options(transport)
    with without():
        first = attempt(make(Stack), how)
    found = []
    for _ in range(2):
        plain = make(Stack)
        parallel, model = ddp(plain), FSDP(make(Stack), **how)
        loss_of(parallel(floats(dist.get_rank()))).backward()
        loss_of(model(floats(dist.get_rank()))).backward()
        for optimized in (plain, model):
            torch.optim.SGD(optimized.parameters(), 0.1).step()
        found.append(differences(model.state_dict(), plain.state_dict()))
    return first, found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("without", [without_an_engine, without_a_unit])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_failed_part_on_one_rank(pool2, transport, without):
    for first, found in pool2.run(with_a_part_on_one_rank, transport, without):
        assert first.startswith("MemoryError") and "planted" in first
        assert found == [[], []]


@passing_groups()
def with_a_failing_initialization(transport):
    """Rank 1's param_init_fn raises in the middle; all try again, then with a new model."""
    how = options(transport)

    def fail(module):
        if dist.get_rank() == 1 and isinstance(module, nn.LayerNorm):
            raise LookupError("planted")
        module.reset_parameters()

    with torch.device("meta"):
        model = Stack()
    found = [attempt(model, {**how, "param_init_fn": fail}), attempt(model, how)]
    with torch.device("meta"):
        model = Stack()
    return found, attempt(model, how), trains(model)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_failed_initialization_on_one_rank(pool2, transport):
    results = pool2.run(with_a_failing_initialization, transport)
    assert results[1][0][0] == "LookupError: planted"
    assert results[0][0][0] == "RuntimeError: rank 1: planted"
    for found, last, trained in results:
        assert "build the model again, on all ranks" in found[1]
        assert last is None and trained
