"""Models on the meta device: materialized, initialized and sharded one unit at a time."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import COMBINATIONS, TRANSPORTS, loss_of
from rows import all_refused
from scenarios import Stack, message_of
from spawn import on_ranks
from torch import nn

import zshard
from benchmarks.memory import high_water, reset_high_water, trim
from zshard import FSDP, fully_shard
from zshard.wrap import build as _values
from zshard.wrap.meta import MemoryCache


class Model(nn.Module):
    """Embedding, blocks, a head that is tied to the embedding and precedes the last layer."""

    def __init__(self):
        super().__init__()
        block = functools.partial(nn.TransformerEncoderLayer, 16, 2, 64, 0.0, batch_first=True)
        self.embed = nn.Embedding(10, 16)
        self.blocks = nn.Sequential(*(block() for _ in range(3)))
        self.head = nn.Linear(16, 10, bias=False)
        self.norm = nn.BatchNorm1d(10)
        self.scale = nn.Linear(10, 10)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.head(self.blocks(self.embed(ids)))
        return self.scale(self.norm(x.transpose(1, 2)).transpose(1, 2))


def on_meta(build):
    with torch.device("meta"):
        return build()


def plain_state(build, seed=5):
    torch.manual_seed(seed)
    return build().state_dict()


@pytest.mark.parametrize("seed_of_rank", [0, 1])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(1, 2)
def test_values_equal_the_plain_model(combination, seed_of_rank):
    strategy, transport = combination
    expected = plain_state(Model)
    model = on_meta(Model)
    names = {id(param): name for name, param in model.named_parameters()}
    torch.manual_seed(5 + seed_of_rank * dist.get_rank())
    model = FSDP(model, strategy=strategy, transport=transport)
    assert {id(param): name for name, param in model.named_parameters()} == names
    assert model.head.weight is model.embed.weight
    assert_same(model.state_dict(), expected, "the state")
    ids = torch.randint(10, (4, 6), generator=torch.Generator().manual_seed(dist.get_rank()))
    loss_of(model(ids)).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@on_ranks(2)
def test_units_by_hand():
    """Each call initializes the modules that it wraps: numbers differ from the plain model's, but
    none is missing."""
    model = on_meta(Model)
    for block in model.blocks:
        fully_shard(block)
    state = fully_shard(model).state_dict()
    assert state.keys() == Model().state_dict().keys()
    assert [name for name, value in state.items() if not value.isfinite().all()] == []


@on_ranks(2)
def test_only_rank_0_has_values():
    """FSDP1's way: the others have to_empty() as param_init_fn, and get rank 0's values."""
    expected = plain_state(Model)
    torch.manual_seed(5)
    if dist.get_rank() == 0:
        model = FSDP(Model())
    else:
        to_empty = lambda m: m.to_empty(device="cpu", recurse=False)  # noqa: E731
        model = FSDP(on_meta(Model), param_init_fn=to_empty)
    assert_same(model.state_dict(), expected, "the state")


class Odd(nn.Module):
    """A parameter and a buffer that no reset_parameters covers."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.full((16,), 3.0))
        self.layer = nn.Linear(16, 16)
        self.register_buffer("angles", torch.arange(16) / 16)
        self.register_buffer("table", torch.arange(16), persistent=False)

    def forward(self, x):
        return self.layer(x) * self.gain + self.angles


def init_odd(module):
    if isinstance(module, Odd):
        module.gain.fill_(3.0)
        module.angles.copy_(torch.arange(16) / 16)
        module.table.copy_(torch.arange(16))
    else:
        module.reset_parameters()


class Flagged(nn.Module):
    """A parameter that is tied, a bool, zeros of unsigned integers, and a parameter without elements."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)
        self.two.weight = self.one.weight
        self.empty = nn.Parameter(torch.ones(0, 4))
        self.register_buffer("mask", torch.ones(16, dtype=torch.bool))
        self.register_buffer("zeros", torch.zeros(4, dtype=torch.uint8))

    def reset_parameters(self):
        self.mask.fill_(True)
        self.zeros.zero_()

    def forward(self, x):
        return self.two(self.one(x)) * self.mask


def init_if_on_meta(module):
    """FSDP1's usual one: it checks for the meta device, and allocates memory itself."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if any(each.is_meta for each in tensors):
        module.to_empty(device="cpu", recurse=False)
        init_odd(module)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("init", [init_odd, init_if_on_meta])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("build", [Odd, Stack, Flagged])
@on_ranks(2)
def test_param_init_fn(build, transport, init):
    expected = plain_state(build)
    model = on_meta(build)
    params = {name: id(param) for name, param in model.named_parameters()}
    torch.manual_seed(5)
    model = FSDP(model, transport=transport, param_init_fn=init)
    assert {name: id(param) for name, param in model.named_parameters()} == params
    assert all(type(each) is not torch.Tensor for each in model.parameters())
    assert_same(model.state_dict(), expected, "the state")
    assert build is not Odd or model.table.tolist() == list(range(16))


class Forgetful(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("angles", torch.ones(4))


def forgets_table(module):
    init_odd(module)
    if isinstance(module, Odd):
        module.table.fill_(torch.iinfo(torch.int64).min)


def test_mistakes_are_named():
    def initialized_by(function):
        return lambda: FSDP(on_meta(Odd), param_init_fn=function)

    not_initialized = (ValueError, "param_init_fn does not initialize")
    looks = initialized_by(lambda module: [p.is_meta for p in module.parameters()])
    all_refused(
        {
            "no reset": (lambda: FSDP(on_meta(Odd)), ValueError, "Odd has no reset_parameters"),
            "forgets": (lambda: FSDP(on_meta(Forgetful)), ValueError, "Forgetful does not initial"),
            "forgets a table": (initialized_by(forgets_table), *not_initialized),
            "does nothing": (initialized_by(lambda module: None), *not_initialized),
            "looks": (looks, *not_initialized),
            "no function": (initialized_by("normal"), TypeError, "takes a module, got 'normal'"),
        }
    )


@on_ranks(2)
def test_meta_and_real_parameters():
    """Adapters with values on a body without."""
    model = nn.Sequential(on_meta(lambda: nn.Linear(4, 4)), nn.Linear(4, 4))
    before = model[1].weight.detach().clone()
    model = FSDP(model)
    assert_same(model.state_dict()["1.weight"], before, "the weight")
    assert "'gain'" in message_of(lambda: FSDP(on_meta(Odd)), ValueError)


# --- cost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["alike", "other seeds", "by rank"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_values_are_sent_only_if_ranks_drew_differently(transport, how):
    def init(module, rank):
        for param in module.parameters(recurse=False):
            param.uniform_()
            param.add_(float(rank) if how == "by rank" else 0.0)
        for buffer in module.buffers(recurse=False):
            buffer.zero_()

    sent, usual, rank = [], _values.take_from, dist.get_rank()
    torch.manual_seed(5 + (rank if how == "other seeds" else 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_values, "take_from", lambda *args: sent.append(args[-1]) or usual(*args))
        model = FSDP(on_meta(Stack), transport=transport, param_init_fn=lambda m: init(m, rank))
    assert len(sent) == (0 if how == "alike" else len(list(Stack().parameters())))
    torch.manual_seed(5)
    plain = on_meta(Stack).to_empty(device="cpu")
    with torch.no_grad():
        for module in (m for b in plain.blocks for m in (*b.children(), b)):
            init(module, 0)
        init(plain.head, 0)
    assert_same(model.state_dict(), plain.state_dict(), "the state, from rank 0's")


def wide():
    return nn.Sequential(*[nn.Linear(2048, 1024, bias=False) for _ in range(12)])


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_peak_memory_of_setup(transport):
    unit = 8 * 2**20
    FSDP(on_meta(Stack), transport=transport)
    model = on_meta(wide)
    trim()
    reset_high_water()
    before = high_water()
    model = FSDP(model, transport=transport, auto_wrap_policy={nn.Linear})
    most, shards = high_water() - before, model.memory()["shards"]
    assert shards == 6 * unit and most <= shards + 1.5 * unit + 2**20


def test_memory_is_reused_for_equal_tensors():
    areas, like = MemoryCache(), torch.empty(512, 512, device="meta", dtype=torch.bfloat16)
    first = areas.empty_like(like).fill_(3)
    assert first.shape == (512, 512) and first.dtype == torch.bfloat16
    place, view = first.data_ptr(), first[1]
    del first
    assert areas.empty_like(like).data_ptr() != place  # a view holds it
    del view
    second = areas.empty_like(like)
    assert second.data_ptr() == place
    other = areas.empty_like(torch.empty(300, 1000, device="meta"))
    del second, areas
    assert other.fill_(1).sum() == 300_000
    small = MemoryCache().empty_like(torch.empty(3, device="meta"))
    assert small.device.type == "cpu" and small.untyped_storage().resizable()


@on_ranks(2)
def test_to_empty_keeps_what_is_initialized():
    """FSDP2's order: meta device, fully_shard(), to_empty(). zshard has initialized it by then."""
    model = zshard.fully_shard(on_meta(Stack))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert model.to_empty(device="cpu") is model
    assert_same(model.state_dict(), before, "the state")
