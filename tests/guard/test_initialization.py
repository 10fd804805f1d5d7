"""Initialization after sharding: the plain model's values under the same seed, or an error.

Each initializer runs on a plain model and on a sharded one after the same seed; both must end with
the same values and random state, bit for bit. Ranks that draw different numbers get an error in
their next collective.
"""

from __future__ import annotations

import functools
import inspect
import math

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import mesh_of, own_group, passing_groups
from models import COMBINATIONS, Case
from offloaded import to
from scenario import Scenario
from scenarios import message_of
from spawn import on_ranks
from torch import nn
from torch.nn import init
from torch.nn.init import trunc_normal_ as early_trunc_normal
from torch.nn.init import xavier_uniform_ as early_xavier

import zshard
from zshard import FSDP, MixedPrecision, ShardError

SHARDED = [combination for combination in COMBINATIONS if combination[0] != "no_shard"]


class Layers(nn.Module):
    """Torch's own layers with parameters, of odd sizes; some shards have no elements."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 7, padding_idx=3)
        self.linear = nn.Linear(7, 13)
        self.norms = nn.ModuleList([nn.LayerNorm(13), nn.RMSNorm(5), nn.GroupNorm(1, 3)])
        self.conv = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5))
        self.back = nn.ConvTranspose1d(4, 2, 3)
        self.attend = nn.MultiheadAttention(8, 2)
        self.recurrent = nn.ModuleList([nn.LSTM(3, 4), nn.GRU(3, 2)])
        self.pairs = nn.Bilinear(3, 4, 5)
        self.slope = nn.PReLU(3)
        self.tiny = nn.Linear(1, 1)

    def forward(self, ids):
        return self.linear(self.embed(ids))


IDS = torch.arange(6).view(2, 3)


def plain_layers():
    torch.manual_seed(0)
    return Layers()


def sharded_layers(combination, model=None, **options):
    strategy, transport = combination
    options = {"strategy": strategy, "transport": transport, "timeout": 20, **options}
    return FSDP(model or plain_layers(), **options)


def initialized(model, function, seed=1):
    """Return the model, and the generator's state afterwards."""
    torch.manual_seed(seed)
    function(model)
    return torch.get_rng_state()


def same_as_plain(function, combination, **options):
    """Fail unless values and random numbers are the plain model's, and a backward works then."""
    plain, model = plain_layers(), sharded_layers(combination, **options)
    ours, theirs = initialized(model, function), initialized(plain, function)
    assert_same(ours, theirs, "the random state")
    model(IDS).float().sum().backward()
    assert_same(model.state_dict(), plain.state_dict(), "the model")


# --- initializers ---------------------------------------------------------------------------------


def resets(model):
    for module in model.modules():
        if isinstance(module, nn.Bilinear):  # it reads the size of its weight
            continue
        reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
        if reset is not None:
            reset()


def each_of_torch(model):
    for param in model.parameters():
        init.normal_(param, 0.1, 0.3)
        init.uniform_(param, -0.3, 0.4)
        init.trunc_normal_(param, std=0.02)
        init.constant_(param, 0.5)
        init.ones_(param)
        if param.dim() >= 2:
            init.xavier_uniform_(param)
            init.xavier_normal_(param, gain=2.0)
            init.kaiming_uniform_(param, a=math.sqrt(5))
            init.kaiming_normal_(param, mode="fan_out", nonlinearity="relu")


def imported_before(model):
    for param in model.parameters():
        early_trunc_normal(param, 0.0, 0.1, -0.2, 0.2)
        if param.dim() >= 2:
            early_xavier(param)


def as_gpt2_does(module):
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(mean=0.0, std=0.02)
        module.bias.data.zero_()
    elif isinstance(module, nn.Embedding):
        module.weight.data.normal_(mean=0.0, std=0.02)
        module.weight.data[module.padding_idx].zero_()


def by_hand(model):
    for module in model.modules():
        as_gpt2_does(module)


def by_apply(model):
    model.apply(as_gpt2_does)


@torch.no_grad()
def other_draws(model):
    generator = torch.Generator().manual_seed(3)
    for param in model.parameters():
        param.uniform_(generator=generator)
        init.normal_(param, generator=generator)
        param.exponential_()
        param.bernoulli_(0.3)


@torch.no_grad()
def views(model):
    model.linear.weight[2:5].normal_()
    model.linear.weight[-1] = 0.0
    model.linear.weight[0, 1:4].uniform_()
    model.conv[0].weight[1, 2].fill_(3.0)
    model.recurrent[0].bias_ih_l0.chunk(4)[1].fill_(1.0)  # the forget gate
    for third in model.attend.in_proj_weight.split(8):
        init.normal_(third, 0.0, 0.1)
    model.attend.in_proj_bias.narrow(0, 8, 8).normal_()


INITIALIZERS = [resets, each_of_torch, imported_before, by_hand, by_apply, other_draws, views]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("function", INITIALIZERS, ids=lambda function: function.__name__)
@on_ranks(2)
def test_values_equal_the_plain_model(function, combination):
    same_as_plain(function, combination)


def kaiming_imported_before(model):
    """With torch's function as it is before the first FSDP(...), also if another test ran
    before."""
    for param in model.parameters():
        if param.dim() >= 2:
            inspect.unwrap(init.kaiming_normal_)(param)


@on_ranks(2)
def test_kaiming_imported_before():
    plain = nn.Sequential(nn.Linear(16, 16, bias=False))
    model = FSDP(nn.Sequential(nn.Linear(16, 16, bias=False)), transport="c10d")
    ours, theirs = (initialized(each, kaiming_imported_before) for each in (model, plain))
    assert_same(ours, theirs, "the random state")
    assert_same(model.state_dict(), plain.state_dict(), "the model")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("function", [resets, each_of_torch])
@on_ranks(2)
def test_with_bf16_compute_and_on_a_disk(function, transport, tmp_path):
    way, precision = ("full_shard", transport), MixedPrecision(param_dtype=torch.bfloat16)
    same_as_plain(function, way, mixed_precision=precision)
    same_as_plain(function, way, offload=to(str(tmp_path)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_full"])
@on_ranks(4)
def test_replicas_in_groups(strategy):
    same_as_plain(resets, (strategy, "c10d"), device_mesh=mesh_of(2, 2))


def with_frozen_embedding():
    model = plain_layers()
    model.embed.requires_grad_(False)
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("combination", SHARDED)
@on_ranks(2)
def test_between_steps(combination):
    """A layer is initialized again while an optimizer has state of it; another one is frozen."""

    def after(training):
        if training.step == 1:
            initialized(training.module, by_hand)

    case = Case(with_frozen_embedding, lambda generator: IDS)
    scenario = Scenario(case, combination, "torch.AdamW", after=after)
    assert_same(scenario.sharded(3).state(), scenario.plain(3).state(), "the training")


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("combination", SHARDED)
@on_ranks(2)
def test_torch_errors_stay_the_same(combination):
    """torch refuses the same calls for shards as for a plain model, with the same message."""
    mistakes = (
        lambda model: init.xavier_uniform_(model.linear.bias),
        lambda model: init.uniform_(model.linear.weight, 1.0, -1.0),
        lambda model: model.linear.weight.normal_(),
        lambda model: model.linear.weight.data[99].zero_(),
    )
    plain, model = plain_layers(), sharded_layers(combination)
    kinds = (ValueError, RuntimeError, IndexError)
    for mistake in mistakes:
        ours, theirs = (message_of(functools.partial(mistake, m), kinds) for m in (model, plain))
        assert ours == theirs
    initialized(plain, resets)
    initialized(model, resets)
    model(IDS).sum().backward()
    assert_same(model.state_dict(), plain.state_dict(), "the model")


@on_ranks(2)
def test_ranges_from_a_shards_size_are_refused():
    model = sharded_layers(("full_shard", "shm"))
    weight = model.linear.weight
    print(weight.numel(), weight.dim(), weight)  # none of these reads a shard's size
    init.normal_(weight, std=0.02)
    bound = weight.shape[1] ** -0.5
    for call in (
        lambda: init.uniform_(weight, -bound, bound),
        lambda: weight.data.normal_(0.0, bound),
        lambda: init.trunc_normal_(weight, std=bound),
        lambda: weight.data[0].uniform_(-bound, bound),
        lambda: init.sparse_(weight, 0.3),
        lambda: weight.data.__setitem__((12, 0), 1.0),
    ):
        said = message_of(call, ShardError)
        assert "a shard of 'linear.weight'" in said and "the full shape, (13, 7)" in said
        assert "summon_full_params(model)" in said and "model.apply(fn)" in said
    assert "'pairs.weight'" in message_of(model.pairs.reset_parameters, ShardError)
    initialized(model, resets)
    init.kaiming_normal_(weight)
    with FSDP.summon_full_params(model):
        init.uniform_(weight, -(weight.shape[1] ** -0.5), weight.shape[1] ** -0.5)


class Changing(nn.Linear):
    def forward(self, x):
        init.normal_(self.weight)
        return super().forward(x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("combination", SHARDED)
@on_ranks(2)
@passing_groups()
def test_within_a_forward(combination):
    model = sharded_layers(combination, nn.Sequential(Changing(4, 4)), process_group=own_group())
    said = message_of(lambda: model(torch.ones(1, 4)).sum().backward(), RuntimeError)
    assert "was modified in place while it was unsharded" in said


def on_one_rank(model):
    if dist.get_rank() == 1:
        initialized(model, by_hand)


def with_own_seeds(model):
    initialized(model, by_hand, seed=dist.get_rank())


def but_for_empty_shards(model):
    torch.manual_seed(1)
    for param in model.parameters():
        if param.numel() > 0:
            init.normal_(param)


def full_ones_on_one_rank(model):
    with FSDP.summon_full_params(model):
        for param in model.parameters() if dist.get_rank() == 1 else ():
            param.data.zero_()


UNLIKE = [
    *(
        (f, way)
        for f in (on_one_rank, with_own_seeds, full_ones_on_one_rank)
        for way in COMBINATIONS
    ),
    *((but_for_empty_shards, way) for way in SHARDED),
    # It returns before it draws where a tensor has no elements, and zshard cannot see that.
    (kaiming_imported_before, ("full_shard", "shm")),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("function", "combination"), UNLIKE)
@on_ranks(2)
@passing_groups()
def test_ranks_with_different_draws_get_an_error(function, combination):
    model = sharded_layers(combination, process_group=own_group())
    function(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        for _ in range(2):
            model(IDS).sum().backward()
            optimizer.step()

    said = message_of(train, zshard.DivergenceError)
    assert "have not initialized parameters or written to full ones alike" in said
    assert "torch.manual_seed()" in said and "model.apply(fn)" in said


@on_ranks(2)
def test_apply_takes_the_values_of_rank_0():
    model, plain = sharded_layers(("full_shard", "shm")), plain_layers()
    initialized(plain, by_apply, seed=0)
    initialized(model, by_apply, seed=dist.get_rank())
    model(IDS).sum().backward()
    assert_same(model.state_dict(), plain.state_dict(), "the model")


@on_ranks(2)
def test_replicas_that_the_script_broadcasts():
    """As in scripts for DDP: the values in the first step count."""
    model = sharded_layers(("no_shard", "shm"))
    with_own_seeds(model)
    for param in model.parameters():
        dist.broadcast(param.data, 0)
    optimizer = zshard.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(IDS).sum().backward()
        optimizer.step()


@on_ranks(2)
def test_noise_in_copies():
    """Draws for tensors other than parameters may differ between ranks, but are shards of the full
    draw."""
    model, plain = sharded_layers(("full_shard", "shm")), plain_layers()
    model(IDS).sum().backward()
    torch.manual_seed(dist.get_rank())
    noise = torch.empty_like(model.linear.weight).normal_()
    torch.manual_seed(dist.get_rank())
    whole = torch.empty_like(plain.linear.weight).normal_()
    model(IDS).sum().backward()
    info = zshard.shard_info(model.linear.weight)
    mine = whole.detach().reshape(-1)[info["begin"] :][: info["numel"]]
    assert_same(noise.to_local().reshape(-1), mine, "this rank's shard of the noise")
