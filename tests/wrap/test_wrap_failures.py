"""FSDP() fails on one rank: all ranks get the reason, and can try again."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import own_group, passing_groups
from models import ddp, loss_of, make
from scenarios import Stack, floats, units_made_by
from spawn import on_ranks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import zshard
from zshard import FSDP
from zshard.model import shard_model

TRANSPORTS = ("shm", "c10d")


def options():
    return {"process_group": own_group(), "timeout": 10}


def attempt(model, **how):
    """Return the text of FSDP()'s error; None if it succeeds."""
    try:
        FSDP(model, **how)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def trains(model):
    loss_of(model(floats(dist.get_rank()))).backward()
    return all(p.grad is not None for p in model.parameters())


def distributed(weight):
    return distribute_tensor(weight, init_device_mesh("cpu", (2,)), [Shard(0)])


class Doubled(TwoTensor):
    """Like torchao's quantized tensors: attributes hold its components."""


MEMORY_ELSEWHERE = {  # a weight as such a tensor, and the words of the error
    "sparse": (lambda weight: weight.to_sparse(), "not a dense tensor", "ignored_"),
    "sparse rows": (lambda weight: weight.to_sparse_csr(), "not a dense tensor", "ignored_"),
    "negated": (torch._neg_view, "not a dense tensor", "ignored_"),
    "DTensor": (distributed, "is a DTensor", "omit parallelize"),
    "FakeTensor": (
        lambda weight: FakeTensorMode().from_tensor(weight),
        *("is of class FakeTensor", "ignored_"),
    ),
    "Doubled": (
        lambda weight: Doubled(weight, weight.clone()),
        *("is of class Doubled", "ignored_"),
    ),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", MEMORY_ELSEWHERE)
@on_ranks(2)
@passing_groups()
def test_parameters_without_memory_of_their_own(kind, transport):
    """An error where the core would read memory; of a sparse one on rank 1 alone. Then all try again."""
    model, how = make(Stack), {**options(), "transport": transport}
    weight = model.head.weight
    change, *words = MEMORY_ELSEWHERE[kind]
    if kind != "sparse" or dist.get_rank() == 1:
        strange = nn.Parameter(change(weight.detach()), requires_grad=kind == "sparse")
        model.head.weight = strange
    else:
        strange = weight
    text = attempt(model, **how)
    assert all(word in text for word in ("head.weight", *words)), text
    assert model.head.weight is strange
    model.head.weight = weight
    assert attempt(model, **how) is None and trains(model)


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
@passing_groups()
def test_failure_before_any_change(transport):
    """An offload directory is missing on all ranks: the next attempt works."""
    model, how = make(Stack), {**options(), "transport": transport}
    offload = zshard.Offload(directory="/nowhere/at/all")
    assert "/nowhere/at/all" in attempt(model, **how, offload=offload)
    assert attempt(model, **how) is None and trains(model)


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
    calls = []

    def make_unit(usual, *args):
        calls.append(args)
        fails = dist.get_rank() == 1 and len(calls) == 2
        return no_memory() if fails else usual(*args)

    return units_made_by(make_unit)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("without", [without_an_engine, without_a_unit])
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
@passing_groups()
def test_failed_part_on_one_rank(transport, without):
    """Rank 1 fails to make a part of a model, which rank 0 makes; then all train another model."""
    how = {**options(), "transport": transport}
    with without():
        text = attempt(make(Stack), **how)
    assert text.startswith("MemoryError") and "planted" in text
    for _ in range(2):
        plain = make(Stack)
        parallel, model = ddp(plain), FSDP(make(Stack), **how)
        for each in (parallel, model):
            loss_of(each(floats(dist.get_rank()))).backward()
            torch.optim.SGD(each.parameters(), 0.1).step()
        assert_same(model.state_dict(), plain.state_dict(), "the state")


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
@passing_groups()
def test_failed_initialization_on_one_rank(transport):
    """Rank 1's param_init_fn raises in the middle; all try again, then with a new model."""
    how = {**options(), "transport": transport}

    def fail(module):
        if dist.get_rank() == 1 and isinstance(module, nn.LayerNorm):
            raise LookupError("planted")
        module.reset_parameters()

    with torch.device("meta"):
        model, another = Stack(), Stack()
    text = attempt(model, **how, param_init_fn=fail)
    assert text == ("LookupError: planted" if dist.get_rank() else "RuntimeError: rank 1: planted")
    assert "build the model again, on all ranks" in attempt(model, **how)
    assert attempt(another, **how) is None and trains(another)


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
@passing_groups()
def test_timeout_names_a_unit_wrapped_before_its_parent(transport):
    """Rank 0's backward waits for rank 1, which does not come."""
    how = {"process_group": own_group(), "timeout": 1.0, "transport": transport}
    model = nn.Sequential(*(FSDP(nn.Linear(4, 4), **how) for _ in range(2)))
    loss = FSDP(model, auto_wrap_policy=None, **how)(torch.ones(1, 4)).sum()
    if dist.get_rank() == 0:
        with pytest.raises(zshard.PeerTimeoutError, match="unit '1'"):
            loss.backward()
    dist.barrier()
