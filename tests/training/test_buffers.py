"""Buffers, broadcast from rank 0 at the start of each forward or left local, as under DDP.

The script replaces, adds and removes buffers between steps. Then casts of mixed precision: in
containers of all kinds, and of buffers. Torch's own FSDP2 casts what torch._apply_to_tensors walks
through; the same values go through our hooks.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import COMBINATIONS, Parts, ddp
from rows import all_refused
from spawn import on_ranks
from torch import Tensor, nn
from torch.distributed.utils import _apply_to_tensors
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import zshard
from zshard import FSDP, MixedPrecision, MixedPrecisionPolicy
from zshard.precision import map_tensors


def replacing():
    """A model with a running mean by assignment, and a batch norm."""

    def forward(model, x):
        x = model.first(x)
        if model.training:
            model.mean = 0.9 * model.mean + 0.1 * x.detach().mean(0)
        return model.last(x - model.mean)

    torch.manual_seed(3)
    first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = Parts(forward, first=first, last=nn.Linear(4, 2))
    model.register_buffer("mean", torch.zeros(4))
    return model


def rows_of(step, rank):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def swap_buffers(inner, step):
    """Lightning's averages of weights replace those of batch norms; others come and go."""
    if step == 1:
        norm = inner.first[1]
        norm.running_mean = norm.running_mean + dist.get_rank()
    if step == 2:
        inner.register_buffer("late", torch.full((2,), float(dist.get_rank())))
    if step == 4:
        del inner.late


def states_of(model, inner, accumulate):
    """Return this rank's buffers after each forward."""
    optimizer = torch.optim.SGD(inner.parameters(), 0.1)
    states = []
    for step in range(6):
        swap_buffers(inner, step)
        within = accumulate and step % 2 == 0
        with model.no_sync() if within else contextlib.nullcontext():
            model(rows_of(step, dist.get_rank())).square().sum().backward()
        states.append({name: each.clone() for name, each in inner.named_buffers()})
        if not within:
            optimizer.step()
            optimizer.zero_grad()
    return states


@pytest.mark.sampled(4)
@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize(
    ("sync", "accumulate"),
    [("training", True), ("training", False), (True, False), ("ddp", False), (False, True)],
)
@on_ranks(2)
def test_buffers_match_ddp(combination, sync, accumulate):
    strategy, transport = combination
    plain = replacing()
    theirs = states_of(ddp(plain, sync_buffers=bool(sync)), plain, accumulate)
    if sync == "ddp":
        model = zshard.DistributedDataParallel(replacing(), transport=transport)
    else:
        options = {"transport": transport, "auto_wrap_policy": {nn.Linear}}
        model = FSDP(replacing(), strategy=strategy, forward_sync_buffers=sync, **options)
    assert_same(states_of(model, model, accumulate), theirs, "the buffers")
    before = [buffer.clone() for buffer in model.buffers()]
    assert_same(model.state_dict(), plain.state_dict(), "the state")
    assert_same(model.buffers(), before, "the buffers after state_dict()")


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@on_ranks(2)
def test_one_rank_evaluates_alone(strategy):
    """Rank 0 alone evaluates over shm, and trains on with the others."""
    options = {"strategy": strategy, "transport": "shm", "timeout": 20}
    model = FSDP(replacing(), forward_sync_buffers="training", **options)
    plain = replacing()
    parallel = ddp(plain, sync_buffers=True)
    for step in range(3):
        for each in (model, parallel):
            each(rows_of(step, dist.get_rank())).square().sum().backward()
        if dist.get_rank() == 0:
            with torch.no_grad():
                ours, theirs = (each.eval()(rows_of(9, 0)) for each in (model, plain))
            assert_same(ours, theirs, "rank 0's evaluation")
            model.train()
            plain.train()
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()), "the buffers")


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_copy_broadcasts_its_own_buffers(transport):
    """A deepcopy of the model broadcasts its own buffers; the original keeps its own."""
    model = FSDP(replacing(), transport=transport, forward_sync_buffers="training")
    twin = copy.deepcopy(model)
    twin.mean = torch.full((4,), float(dist.get_rank()))
    twin(rows_of(0, 0)).sum().backward()
    assert_same(model.mean, torch.zeros(4), "the original's buffer")
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, twin.mean.clone())
    assert_same(everyone[0], everyone[1], "the copy's buffer")


def test_invalid_argument_is_refused():
    call = lambda: FSDP(replacing(), forward_sync_buffers="eval")  # noqa: E731
    text = "one of False, True, 'training', got 'eval'"
    all_refused({"a word of no meaning": (call, ValueError, text)})


# --- casts of mixed precision, as FSDP2 has them --------------------------------------------------

BF16 = torch.bfloat16


@dataclasses.dataclass
class Batch:
    x: Any
    ids: Tensor
    note: str = "kept"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor


class Dict(dict):
    """A subclass with its own constructor, and attributes."""

    def __init__(self, owner):
        super().__init__()
        self.owner = owner


class Pair(NamedTuple):
    first: Any
    second: Any


class Output(collections.OrderedDict):
    """As transformers' ModelOutput: items are attributes as well."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


def filled(container, **items):
    for key, value in items.items():
        container[key] = value
    return container


CONTAINERS = {
    "dataclass": lambda x: Batch(x, torch.ones(2, dtype=torch.int64)),
    "frozen": Frozen,
    "OrderedDict": lambda x: collections.OrderedDict(x=x, y=[x]),
    "dict subclass": lambda x: filled(Dict("me"), x=x, n=3),
    "defaultdict": lambda x: filled(collections.defaultdict(list), x=[x]),
    "ModelOutput": lambda x: filled(Output(), x=x),
    "namedtuple": lambda x: Pair(x, (x, None)),
    "set": lambda x: {x},
    "nested": lambda x: [Batch({"a": (x,)}, x.long())],
}


def dtypes_in(value):
    """Return the dtypes of all tensors, as torch walks through them."""
    dtypes = []
    _apply_to_tensors(lambda tensor: dtypes.append(tensor.dtype) or tensor, copy.copy(value))
    return dtypes


class Passes(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, batch):
        self.seen = batch
        return batch


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_containers_are_cast_as_in_fsdp2(transport):
    """Tensors in containers are cast as FSDP2 casts them, on the way in and out."""
    back = MixedPrecisionPolicy(BF16, output_dtype=torch.float64)
    for precision, out in ((MixedPrecision(BF16), BF16), (back, torch.float64)):
        model = FSDP(Passes(), mixed_precision=precision, transport=transport)
        for name, make in CONTAINERS.items():
            batch = make(torch.ones(2, requires_grad=True))
            before = dtypes_in(batch)
            output = model(batch)
            for value, dtype in ((model.seen, BF16), (output, out)):
                wanted = [dtype if each.is_floating_point else each for each in before]
                assert dtypes_in(value) == wanted, name
            assert type(output) is type(batch) and dtypes_in(batch) == before, name


def to_bf16(tensor):
    return tensor.to(BF16) if tensor.is_floating_point() else tensor


def test_uncast_objects_are_not_copied():
    cache = {"ids": torch.ones(2, dtype=torch.int64), "list": [1, None]}
    cache["itself"] = cache
    holds_itself = [torch.ones(1)]
    holds_itself.append(holds_itself)
    assert map_tensors(lambda t: t, cache) is cache
    assert map_tensors(lambda t: t + 1, holds_itself)[0] == 2
    low = map_tensors(to_bf16, CONTAINERS["dict subclass"](torch.ones(1)))
    assert type(low) is Dict and low.owner == "me" and low["x"].dtype == BF16
    assert map_tensors(to_bf16, CONTAINERS["ModelOutput"](torch.ones(1))).x.dtype == BF16
    packed = map_tensors(to_bf16, pack_sequence([torch.ones(2)]))
    assert type(packed) is PackedSequence and packed.data.dtype == BF16


# --- buffers --------------------------------------------------------------------------------------


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.left = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
        for each, name in ((self.inner, "scale"), (self.left, "scale"), (self.left[0], "deep")):
            each.register_buffer(name, torch.full((4,), 1 / 3))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_buffer_dtype(combination, tmp_path):
    """Buffers are cast in the model, ignored ones are not; state dicts keep their dtype."""
    plain = Buffered()
    model = FSDP(
        plain,
        mixed_precision=MixedPrecision(BF16, buffer_dtype=BF16),
        ignored_modules=[plain.left],
        strategy=combination[0],
        transport=combination[1],
    )
    third = torch.full((4,), 1 / 3)
    within = {"inner.scale": third.bfloat16(), "left.scale": third, "left.0.deep": third}
    assert_same(dict(model.named_buffers()), within, "the buffers within")
    state = model.state_dict()
    buffers = {name: state[name] for name in within}
    wanted = {name: value.float() for name, value in within.items()}
    assert_same(buffers, wanted, "the buffers in the state dict")
    for each in (model.inner.state_dict(), copy.deepcopy(model).state_dict()):
        assert {value.dtype for value in each.values()} == {torch.float32}
    zshard.save(tmp_path / "saved", model)
    fresh = Buffered()
    zshard.load(tmp_path / "saved", fresh)
    assert_same(fresh.state_dict(), state, "the loaded plain state")
    zshard.load(tmp_path / "saved", model)
    model.load_state_dict(state)
    assert_same(model.state_dict(), state, "the loaded state")
    assert {buffer.dtype for buffer in model.inner.buffers()} == {BF16}


class Counted(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.count.add_(1)
        return super().forward(x)


@on_ranks(2)
def test_a_buffer_that_modules_share_stays_shared():
    plain = nn.Sequential(Counted(4, 4), nn.Linear(4, 4))
    count = torch.zeros(1)
    for each in plain:
        each.register_buffer("count", count)
    model = FSDP(plain, mixed_precision=MixedPrecision(BF16, buffer_dtype=BF16))
    model(torch.ones(2, 4))
    assert model[0].count is model[1].count
    assert float(model[1].count) == 1.0
