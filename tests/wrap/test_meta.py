"""Models on the meta device: materialized, initialized and sharded one unit at a time."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from models import CASES, COMBINATIONS, TRANSPORTS, differences, loss_of, make, train
from scenarios import Stack, message_of
from spawn import on_ranks
from torch import nn

import zshard
from benchmarks.memory import high_water, reset_high_water, trim
from zshard import FSDP, fully_shard
from zshard.wrap import build as _values
from zshard.wrap.meta import MemoryCache


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.batch = nn.BatchNorm1d(16)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attend(y, y, y, need_weights=False)[0]
        return x + self.batch(self.mlp(x).transpose(1, 2)).transpose(1, 2)


class Model(nn.Module):
    """Embedding, blocks, a head that is tied to the embedding and precedes the last layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 10, bias=False)
        self.scale = nn.Linear(10, 10)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.scale(self.head(x))


def on_meta(build):
    with torch.device("meta"):
        return build()


def plain_state(build, seed=5):
    torch.manual_seed(seed)
    return build().state_dict()


def values(combination, seed_of_rank):
    """Return (what differs from a plain model of rank 0's seed; whether the tie still exists; what
    differs afterwards)."""
    strategy, transport = combination
    expected = plain_state(Model)
    model = on_meta(Model)
    names = {id(param): name for name, param in model.named_parameters()}
    torch.manual_seed(5 + seed_of_rank * dist.get_rank())
    model = FSDP(model, strategy=strategy, transport=transport)
    same = {id(param): name for name, param in model.named_parameters()} == names
    tied = model.head.weight is model.embed.weight
    wrong = differences(model.state_dict(), expected)
    ids = torch.randint(10, (4, 6), generator=torch.Generator().manual_seed(dist.get_rank()))
    loss_of(model(ids)).backward()
    untrained = [name for name, p in model.named_parameters() if p.grad is None]
    return wrong, same, tied, untrained


@pytest.mark.parametrize("seed_of_rank", [0, 1])
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_values_equal_the_plain_model(pool2, combination, seed_of_rank):
    found = pool2.run(values, combination, seed_of_rank)
    assert found == [([], True, True, [])] * 2


def test_single_rank():
    expected = plain_state(Model)
    model = on_meta(Model)
    torch.manual_seed(5)
    assert differences(FSDP(model).state_dict(), expected) == []


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_training_matches_the_plain_model(name):
    case = CASES[name]
    plain = make(case.make)
    model = on_meta(case.make)
    torch.manual_seed(0)
    expected = case.make()
    torch.manual_seed(0)
    model = FSDP(model, auto_wrap_policy=case.policy)
    assert differences(model.state_dict(), expected.state_dict()) == []
    model.load_state_dict(plain.state_dict())
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, plain)]
    ours, theirs = (
        train(each, case, optimizer, 0)
        for each, optimizer in zip((model, plain), optimizers, strict=True)
    )
    assert ours == theirs


@on_ranks(2)
def test_units_by_hand():
    expected = plain_state(Model)
    model = on_meta(Model)
    torch.manual_seed(5)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    # Each call initializes what it wraps: other numbers than the plain model's, but none is
    # missing.
    state = model.state_dict()
    assert state.keys() == expected.keys()
    assert [name for name, value in state.items() if not value.isfinite().all()] == []


def rank_0_is_real():
    """FSDP1's way: the others have to_empty() as param_init_fn, and get rank 0's values."""
    expected = plain_state(Model)
    torch.manual_seed(5)
    if dist.get_rank() == 0:
        return differences(FSDP(Model()).state_dict(), expected)
    model = on_meta(Model)
    model = FSDP(model, param_init_fn=lambda m: m.to_empty(device="cpu", recurse=False))
    return differences(model.state_dict(), expected)


def test_only_rank_0_has_values(pool2):
    assert pool2.run(rank_0_is_real) == [[], []]


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


def test_param_init_fn():
    expected = plain_state(Odd)
    model = on_meta(Odd)
    torch.manual_seed(5)
    model = FSDP(model, param_init_fn=init_odd)
    assert differences(model.state_dict(), expected) == []
    assert model.table.tolist() == list(range(16))


class Flagged(nn.Module):
    """A parameter that is tied, a bool, and a parameter without elements."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)
        self.two.weight = self.one.weight
        self.empty = nn.Parameter(torch.ones(0, 4))
        self.register_buffer("mask", torch.ones(16, dtype=torch.bool))

    def reset_parameters(self):
        self.mask.fill_(True)

    def forward(self, x):
        return self.two(self.one(x)) * self.mask


def init_if_on_meta(module):
    """FSDP1's usual one: it checks for the meta device, and allocates memory itself."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if any(each.is_meta for each in tensors):
        module.to_empty(device="cpu", recurse=False)
        init_odd(module)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("build", [Odd, Stack, Flagged])
@on_ranks(2)
def test_param_init_fn_that_checks_for_the_meta_device(build, transport):
    expected = plain_state(build)
    model = on_meta(build)
    params = {name: id(param) for name, param in model.named_parameters()}
    torch.manual_seed(5)
    model = FSDP(model, param_init_fn=init_if_on_meta, transport=transport)
    assert {name: id(param) for name, param in model.named_parameters()} == params
    assert all(type(each) is not torch.Tensor for each in model.parameters())
    assert differences(model.state_dict(), expected) == []


def test_param_init_fn_that_does_nothing_is_named():
    for function in (lambda module: None, lambda module: [p.is_meta for p in module.parameters()]):
        with pytest.raises(ValueError, match=r"'layer.weight' .*param_init_fn does not initialize"):
            FSDP(on_meta(Odd), param_init_fn=function)


class Forgetful(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("angles", torch.ones(4))


def forgets_table(module):
    init_odd(module)
    if isinstance(module, Odd):
        module.table.fill_(torch.iinfo(torch.int64).min)


MISTAKES = [
    (lambda: FSDP(on_meta(Odd)), ValueError, "'gain' .*Odd has no reset_parameters"),
    (lambda: FSDP(on_meta(Forgetful)), ValueError, "'angles' .*Forgetful does not initialize it"),
    (lambda: FSDP(on_meta(Odd), param_init_fn=forgets_table), ValueError, "'table' .*param_init_fn"),
    (lambda: FSDP(nn.Linear(1, 1), param_init_fn="normal"), TypeError, "callable that takes a module, got 'normal'"),
]  # fmt: skip


@pytest.mark.parametrize(("action", "kind", "match"), MISTAKES, ids=[m for *_, m in MISTAKES])
def test_uninitialized_tensors_are_named(action, kind, match):
    with pytest.raises(kind, match=match):
        action()


@on_ranks(2)
def test_meta_and_real_parameters():
    """Adapters with values on a body without."""
    model = nn.Sequential(on_meta(lambda: nn.Linear(4, 4)), nn.Linear(4, 4))
    before = model[1].weight.detach().clone()
    model = FSDP(model)
    wrong = differences(model.state_dict()["1.weight"], before)
    message = message_of(lambda: FSDP(on_meta(Odd)), ValueError)
    assert wrong == [] and "'gain'" in message


# --- cost -----------------------------------------------------------------------------------------


def drawn(how, transport):
    """Return (how many values were sent, what differs from rank 0's)."""
    torch.manual_seed(5 + (dist.get_rank() if how == "other seeds" else 0))
    rank = 0.0 if how == "alike" else float(dist.get_rank())

    def init(module):
        for param in module.parameters(recurse=False):
            param.uniform_()
            param.add_(rank if how == "by rank" else 0.0)
        for buffer in module.buffers(recurse=False):
            buffer.zero_()

    sent, usual = [], _values.take_from
    _values.take_from = lambda *args: sent.append(args[-1]) or usual(*args)
    try:
        model = FSDP(on_meta(Stack), transport=transport, param_init_fn=init)
    finally:
        _values.take_from = usual
    states = [None, None]
    dist.all_gather_object(states, {k: v.clone() for k, v in model.state_dict().items()})
    torch.manual_seed(5)
    plain = on_meta(Stack).to_empty(device="cpu")
    rank = 0.0
    with torch.no_grad():
        for module in (m for b in plain.blocks for m in (*b.children(), b)):
            init(module)
        init(plain.head)
    return len(sent), differences(states[0], plain.state_dict()) + differences(*states)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_values_are_sent_only_if_ranks_drew_differently(pool2, transport):
    everything = len(list(Stack().parameters()))
    assert pool2.run(drawn, "alike", transport) == [(0, [])] * 2
    assert pool2.run(drawn, "other seeds", transport) == [(everything, [])] * 2
    assert pool2.run(drawn, "by rank", transport) == [(everything, [])] * 2


def wide():
    return nn.Sequential(*[nn.Linear(2048, 1024, bias=False) for _ in range(12)])


def bytes_of_setup(transport):
    """Return the most bytes beyond existing ones, and those kept."""
    FSDP(on_meta(Stack), transport=transport)
    model = on_meta(wide)
    trim()
    reset_high_water()
    before = high_water()
    model = FSDP(model, transport=transport, auto_wrap_policy={nn.Linear})
    most = high_water() - before
    return most, model.memory()["shards"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_peak_memory_of_setup(pool2, transport):
    unit = 8 * 2**20
    for most, shards in pool2.run(bytes_of_setup, transport):
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
    assert differences(model.state_dict(), before) == []


class Masked(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("mask", torch.ones(4, dtype=torch.uint8))

    def reset_parameters(self):
        super().reset_parameters()
        if "mask" in self._buffers:
            self.mask.zero_()


def test_zeros_of_unsigned_integers_are_values():
    assert not FSDP(on_meta(Masked)).mask.any()
