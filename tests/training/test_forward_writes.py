"""Forwards that write to parameters, read `.data`, or parametrize a module.

The rest of the forward computes with the new values on all ranks, however far ahead or behind one
of them is. MoCo's momentum update and SwAV's prototypes write in this way.
"""

from __future__ import annotations

import functools
import time

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import COMBINATIONS, Parts, make, wrapped
from scenarios import FULL, WIDTH, check_mean_grads, forward_backward
from spawn import on_ranks
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import zshard

HYBRID = [("hybrid_shard", "c10d"), ("hybrid_full", "c10d")]


def lag(turn):
    """One rank falls behind the other, in turn."""
    if dist.is_initialized() and dist.get_rank() == turn % 2:
        time.sleep(0.005)


def momentum(update):
    """Each forward moves a layer's weights towards another's, and uses it before and after."""

    def forward(model, x):
        query, key, prototypes = model.query, model.key, model.prototypes
        with torch.no_grad():
            lag(0)
            before = key(x)
            for ours, theirs in zip(key.parameters(), query.parameters(), strict=True):
                UPDATES[update](ours, theirs)
                lag(1)
            norms = prototypes.weight.norm(dim=1, keepdim=True)
            prototypes.weight.copy_(prototypes.weight / norms)
            target = key(x)
        return prototypes(query(x)) + (target - before)[:, :5]

    key = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    prototypes = nn.Linear(WIDTH, 5, bias=False)
    return Parts(forward, query=nn.Linear(WIDTH, WIDTH), key=key, prototypes=prototypes)


def by_new_data(key, query):
    key.data = key.data * 0.9 + query.data * 0.1


UPDATES = {
    "in place": lambda key, query: key.mul_(0.9).add_(query, alpha=0.1),
    "of a value": lambda key, query: key.mul_(0.9).add_(query * 0.1),
    "by a copy": lambda key, query: key.copy_(key * 0.9 + query * 0.1),
    "through data": lambda key, query: key.data.mul_(0.9).add_(query.detach().data * 0.1),
    "by new data": by_new_data,
}


def batches():
    return torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(0))


def train(model):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def two_of(build, combination, **options):
    """Return a plain model, and one that is sharded by its linear layers."""
    return make(build), wrapped(build, combination, auto_wrap_policy={nn.Linear}, **options)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("combination", [*COMBINATIONS, *HYBRID])
@pytest.mark.parametrize("update", UPDATES)
@on_ranks(2)
def test_forward_computes_with_what_it_wrote(update, combination):
    plain, model = two_of(functools.partial(momentum, update), combination)
    assert train(model) == train(plain)
    assert_same(model.state_dict(), plain.state_dict(), "the state")


@on_ranks(2)
def test_bf16_casts_follow_a_write():
    """Peers read casts of the shards, and the forward writes to the shards."""
    policy = zshard.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    build = functools.partial(momentum, "in place")
    losses = [
        train(two_of(build, ("full_shard", transport), mixed_precision=policy)[1])
        for transport in ("shm", "c10d")
    ]
    assert losses[0] == losses[1]


@on_ranks(2)
def test_write_in_a_forward_without_gradients_is_refused():
    """One rank may run such a forward alone, so it cannot wait for the others; the remedy works."""
    plain, model = two_of(functools.partial(momentum, "in place"), FULL)
    batch = torch.ones(2, WIDTH)
    with pytest.raises(RuntimeError, match=r"'key'.*without gradients"), torch.no_grad():
        model(batch)
    model(batch)
    plain(batch)
    assert_same(model.state_dict(), plain.state_dict(), "the state")


# --- .data ----------------------------------------------------------------------------------------


class Decaying(nn.Linear):
    """Writes to its weight through `.data`."""

    def forward(self, x):
        self.weight.data.mul_(0.5)
        return super().forward(x)


class Looking(nn.Linear):
    """Reads its weight through `.data`."""

    def forward(self, x):
        return super().forward(x) + self.weight.data.mean() * 0.0


def pair_of(kind):
    return nn.Sequential(kind(40, 40), kind(40, 40))


def backward_of_ones(model, rank):
    model(torch.ones(4, 40) * (rank + 1)).square().mean().backward()


@pytest.mark.parametrize(
    ("kind", "combinations"), [(Looking, COMBINATIONS), (Decaying, [("no_shard", "shm")])]
)
@on_ranks(2)
def test_data_in_forward(kind, combinations):
    """Reading is right everywhere; writing is right where nothing is sharded."""
    build = functools.partial(pair_of, kind)
    check_mean_grads(build, backward_of_ones, True, combinations, {kind})


@pytest.mark.parametrize("combination", [c for c in COMBINATIONS if c[0] != "no_shard"])
@on_ranks(2)
def test_write_to_data_in_forward_is_refused(combination):
    """No rank's parameters change."""
    model = wrapped(functools.partial(pair_of, Decaying), combination, auto_wrap_policy={Decaying})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"(?s)was modified in place.*p\.data"):
        backward_of_ones(model, dist.get_rank())
    model.zero_grad()
    assert_same(model.state_dict(), before, "the state")


# --- torch.nn.utils.parametrize, as PEFT's `target_parameters` uses it ----------------------------


class Plus(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, weight):
        return weight + self.change


def lora_on_parameter(trains):
    """PEFT's wrapper of a module with experts' weights, which is a separate unit."""

    def forward(model, x):
        trains = model.base.weight.requires_grad
        change = model.up.weight @ model.down.weight
        parametrize.register_parametrization(model.base, "weight", Plus(change))
        model.base.parametrizations.weight.original.requires_grad_(trains)
        try:
            return model.base(x)
        finally:
            parametrize.remove_parametrizations(model.base, "weight", leave_parametrized=False)

    base = nn.Linear(WIDTH, 300).requires_grad_(trains)
    down, up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 300, bias=False)
    return Parts(forward, base=base, down=down, up=up)


def setting(source):
    """A model whose forward calls `weight.set_()` with itself, an alias or a copy."""

    def forward(model, x):
        weight = model.layer.weight
        with torch.no_grad():
            if source == "copy":
                weight.set_(weight * 2)
            else:
                weight.set_(weight if source == "itself" else weight.detach())
        return F.linear(x, weight, model.layer.bias)

    return Parts(forward, layer=nn.Linear(WIDTH, 300))


@pytest.mark.parametrize("trains", [True, False])
@on_ranks(2)
def test_parametrization_in_forward(trains):
    check_mean_grads(lambda: lora_on_parameter(trains), forward_backward, True)


@pytest.mark.parametrize("source", ["itself", "alias"])
@on_ranks(2)
def test_set_to_own_memory_changes_nothing(source):
    check_mean_grads(lambda: setting(source), forward_backward, True)


@on_ranks(2)
def test_set_to_other_memory_is_refused():
    model = wrapped(lambda: setting("copy"), FULL)
    with pytest.raises(RuntimeError, match=r"layer\.weight.*replaced"):
        forward_backward(model, 0)


# --- optimizers within a forward ------------------------------------------------------------------


class Decayed(torch.optim.Optimizer):
    """An optimizer of a script, whose operations on shards the guard sees."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            sums = self.state[param].setdefault("sums", torch.zeros(param.shape))
            sums.mul_(0.9).add_(param.grad + param * 0.01)
            param.sub_(sums * self.param_groups[0]["lr"])


class Greedy(nn.Module):
    """Trains each layer by its own loss, and continues with the new weights' output."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))  # of the unit whose forward runs
        self.kind, self.optimizers = kind, None

    def forward(self, x):
        if self.optimizers is None:
            first = self.kind([*self.first.parameters(), self.scale], lr=0.05)
            second = zshard.SGD(self.second.parameters(), lr=0.05, momentum=0.9)
            self.optimizers = first, second
        x = x * self.scale
        layers = zip((self.first, self.second), self.optimizers, strict=True)
        for turn, (layer, optimizer) in enumerate(layers):
            loss = layer(x).square().mean() + self.scale.square().sum()
            loss.backward()
            lag(turn)
            optimizer.step()
            optimizer.zero_grad()
            x = torch.tanh(layer(x.detach())) * self.scale
        return x


@pytest.mark.sampled(8)
@pytest.mark.parametrize("combination", [*COMBINATIONS, *HYBRID])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, Decayed])
@on_ranks(2)
def test_step_within_a_forward(kind, combination):
    """All ranks have stepped before any of them reads the new weights, and none writes while
    another reads."""
    plain, model = two_of(functools.partial(Greedy, kind), combination)
    for batch in batches():
        assert_same(model(batch).detach(), plain(batch).detach(), "the output")
    assert_same(model.state_dict(), plain.state_dict(), "the state")
