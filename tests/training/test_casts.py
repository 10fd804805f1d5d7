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
    x: Tensor
    ids: Tensor
    note: str = "kept"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor


class Dict(dict[str, Any]):
    """A subclass with a constructor of its own, and attributes."""

    def __init__(self, owner: str) -> None:
        super().__init__()
        self.owner = owner


class Pair(NamedTuple):
    first: Any
    second: Any


class Output(collections.OrderedDict[str, Any]):
    """As transformers' ModelOutput: items are attributes as well."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


def dict_of(x: Tensor) -> Dict:
    made = Dict("me")
    made["x"], made["n"] = x, 3
    return made


def default_of(x: Tensor) -> Any:
    made: Any = collections.defaultdict(list)
    made["x"].append(x)
    return made


def output_of(x: Tensor) -> Output:
    made = Output()
    made["x"] = x
    return made


CONTAINERS = {
    "dataclass": lambda x: Batch(x, torch.ones(2, dtype=torch.int64)),
    "frozen": Frozen,
    "OrderedDict": lambda x: collections.OrderedDict(x=x, y=[x]),
    "dict subclass": dict_of,
    "defaultdict": default_of,
    "ModelOutput": output_of,
    "namedtuple": lambda x: Pair(x, (x, None)),
    "set": lambda x: {x},
    "nested": lambda x: [Batch({"a": (x,)}, x.long())],  # type: ignore[arg-type]
}


def found_in(value: Any) -> list[torch.dtype]:
    """The dtypes of all tensors, as torch walks through them."""
    dtypes: list[torch.dtype] = []
    _apply_to_tensors(lambda tensor: dtypes.append(tensor.dtype) or tensor, copy.copy(value))
    return dtypes


class Passes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, batch: Any) -> Any:
        self.seen = batch
        return batch


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_containers_are_cast_as_in_fsdp2(transport):
    """Tensors in containers are cast as FSDP2 casts them, on the way in and out."""
    low: Any = FSDP(Passes(), mixed_precision=MixedPrecision(BF16), transport=transport)
    policy = MixedPrecisionPolicy(BF16, output_dtype=torch.float64)
    back: Any = FSDP(Passes(), mixed_precision=policy, transport=transport)
    for name, make in CONTAINERS.items():
        for model, dtype in ((low, BF16), (back, torch.float64)):
            given = make(torch.ones(2, requires_grad=True))
            before = found_in(given)
            output = model(given)
            floats = [BF16 if each.is_floating_point else each for each in before]
            wanted = [dtype if each.is_floating_point else each for each in before]
            assert found_in(model.seen) == floats and found_in(output) == wanted, name
            assert type(output) is type(given) and found_in(given) == before, name


def test_uncast_objects_are_not_copied() -> None:
    cache: Any = {"ids": torch.ones(2, dtype=torch.int64), "list": [1, None]}
    cache["itself"] = cache
    holds_itself: list[Any] = [torch.ones(1)]
    holds_itself.append(holds_itself)
    assert map_tensors(lambda t: t, cache) is cache
    assert map_tensors(lambda t: t + 1, holds_itself)[0] == 2
    made = map_tensors(lambda t: t.to(BF16), dict_of(torch.ones(1)))
    assert type(made) is Dict and made.owner == "me" and made["x"].dtype == BF16
    output = map_tensors(lambda t: t.to(BF16), output_of(torch.ones(1)))
    assert output.x.dtype == BF16
    packed = map_tensors(
        lambda t: t.to(BF16) if t.is_floating_point() else t, pack_sequence([torch.ones(2)])
    )
    assert type(packed) is PackedSequence and packed.data.dtype == BF16


def test_outputs_of_transformers_are_cast() -> None:
    outputs = pytest.importorskip("transformers").modeling_outputs
    given = outputs.BaseModelOutput(last_hidden_state=torch.ones(1))
    made = map_tensors(lambda t: t.to(BF16), given)
    assert type(made) is outputs.BaseModelOutput
    assert made.last_hidden_state.dtype == made["last_hidden_state"].dtype == BF16
    assert given.last_hidden_state.dtype == torch.float32


# --- buffers --------------------------------------------------------------------------------------


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))
        self.inner.register_buffer("scale", torch.full((4,), 1 / 3))
        self.left = nn.Sequential(nn.Linear(4, 4))
        self.left.register_buffer("scale", torch.full((4,), 1 / 3))
        self.left[0].register_buffer("deep", torch.full((4,), 1 / 3))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_buffer_dtype(combination, tmp_path):
    """Buffers are cast in the model, ignored ones are not; state dicts keep their dtype."""
    folder = str(tmp_path / "saved")
    plain = Buffered()
    strategy, transport = combination
    model: Any = FSDP(
        plain,
        mixed_precision=MixedPrecision(BF16, buffer_dtype=BF16),
        ignored_modules=[plain.left],
        strategy=strategy,
        transport=transport,
    )
    within = {name: buffer.dtype for name, buffer in model.named_buffers()}
    assert within == {
        "inner.scale": BF16,
        "left.scale": torch.float32,
        "left.0.deep": torch.float32,
    }
    state = model.state_dict()
    kept = torch.full((4,), 1 / 3)
    for name in ("left.scale", "left.0.deep"):
        assert_same(state[name], kept, name)
    assert_same(state["inner.scale"], kept.bfloat16().float(), "inner.scale")
    for each in (model.inner.state_dict(), copy.deepcopy(model).state_dict()):
        assert {value.dtype for value in each.values()} == {torch.float32}
    zshard.save(folder, model)
    fresh = Buffered()
    zshard.load(folder, fresh)
    assert_same(fresh.state_dict(), state, "the loaded plain state")
    zshard.load(folder, model)
    model.load_state_dict(state)
    assert_same(model.state_dict(), state, "the loaded state")
    assert {buffer.dtype for buffer in model.inner.buffers()} == {BF16}


class Counted(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.count.add_(1)
        return super().forward(x)


@on_ranks(2)
def test_a_buffer_that_modules_share_stays_shared():
    plain = nn.Sequential(Counted(4, 4), nn.Linear(4, 4))
    count = torch.zeros(1)
    for each in plain:
        each.register_buffer("count", count)
    model: Any = FSDP(plain, mixed_precision=MixedPrecision(BF16, buffer_dtype=BF16))
    model(torch.ones(2, 4))
    assert model[0].count is model[1].count
    assert float(model[1].count) == 1.0
