"""Casts of mixed precision: in containers of all kinds, and of buffers, as under FSDP1 and FSDP2.

Torch's own FSDP2 casts what torch._apply_to_tensors walks through; the same values go
through our hooks.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from compare import assert_same
from models import COMBINATIONS
from spawn import on_ranks
from torch import Tensor, nn
from torch.distributed.utils import _apply_to_tensors
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import zshard
from zshard import FSDP, MixedPrecision, MixedPrecisionPolicy
from zshard.precision import map_tensors

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
    """A subclass with a constructor of its own, and attributes."""

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


def test_outputs_of_transformers_are_cast():
    outputs = pytest.importorskip("transformers").modeling_outputs
    output = outputs.BaseModelOutput(last_hidden_state=torch.ones(1))
    low = map_tensors(to_bf16, output)
    assert type(low) is outputs.BaseModelOutput
    assert low.last_hidden_state.dtype == low["last_hidden_state"].dtype == BF16
    assert output.last_hidden_state.dtype == torch.float32


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
