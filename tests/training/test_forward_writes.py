"""Forwards that write to parameters, read `.data`, or parametrize a module.

The rest of the forward computes with the new values on all ranks, however far ahead or behind one
of them is. MoCo's momentum update and SwAV's prototypes write in this way.
"""

from __future__ import annotations

import copy
import functools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import COMBINATIONS, make, wrapped
from scenarios import FULL, WIDTH, check_mean_grads, forward_backward, message_of
from spawn import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import zshard
from zshard import FSDP

HYBRID = [("hybrid_shard", "c10d"), ("hybrid_full", "c10d")]


def lag(turn: int) -> None:
    """One rank falls behind the other, in turn."""
    if dist.is_initialized() and dist.get_rank() == turn % 2:
        time.sleep(0.005)


class Momentum(nn.Module):
    """Moves one layer's weights towards another's in each forward, and uses it before and after."""

    def __init__(self, update: Any) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.prototypes = nn.Linear(WIDTH, 5, bias=False)
        self.key.requires_grad_(False)
        self.update = update

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            lag(0)
            before = self.key(x)
            for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
                self.update(key, query)
                lag(1)
            norms = self.prototypes.weight.norm(dim=1, keepdim=True)
            self.prototypes.weight.copy_(self.prototypes.weight / norms)
            target = self.key(x)
        return self.prototypes(self.query(x)) + (target - before)[:, :5]


def in_place(key: Tensor, query: Tensor) -> None:
    key.mul_(0.9).add_(query, alpha=0.1)


def of_a_value(key: Tensor, query: Tensor) -> None:
    key.mul_(0.9).add_(query * 0.1)


def by_a_copy(key: Tensor, query: Tensor) -> None:
    key.copy_(key * 0.9 + query * 0.1)


def through_data(key: Tensor, query: Tensor) -> None:
    key.data.mul_(0.9).add_(query.detach().data * 0.1)


def by_new_data(key: Tensor, query: Tensor) -> None:
    key.data = key.data * 0.9 + query.data * 0.1


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05)
    losses = []
    for batch in torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(0)):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_writing(update: Any, strategy: str, transport: str) -> None:
    """Losses and parameters are those of the plain model."""
    plain = make(functools.partial(Momentum, update))
    model = FSDP(
        copy.deepcopy(plain), strategy=strategy, transport=transport, auto_wrap_policy={nn.Linear}
    )
    assert train(model) == train(plain)
    assert_same(model.state_dict(), plain.state_dict(), "the state")


@pytest.mark.sampled(9)
@pytest.mark.parametrize("combination", [*COMBINATIONS, *HYBRID])
@pytest.mark.parametrize("update", [in_place, of_a_value, by_a_copy, through_data, by_new_data])
def test_forward_computes_with_what_it_wrote(pool2: Any, update, combination) -> None:
    pool2.run(train_writing, update, *combination)


@on_ranks(2)
def test_bf16_casts_follow_a_write():
    """Peers read casts of the shards, and the forward writes to the shards."""
    plain = make(functools.partial(Momentum, in_place))
    policy = zshard.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    losses = []
    for transport in ("shm", "c10d"):
        model = FSDP(
            copy.deepcopy(plain),
            transport=transport,
            mixed_precision=policy,
            auto_wrap_policy={nn.Linear},
        )
        losses.append(train(model))
    assert losses[0] == losses[1]


def evaluate_writing() -> None:
    """The write is refused; the error's remedy works."""
    plain = make(functools.partial(Momentum, in_place))
    model = FSDP(copy.deepcopy(plain), transport="shm", auto_wrap_policy={nn.Linear})
    batch = torch.ones(2, WIDTH)

    def evaluate() -> None:
        with torch.no_grad():
            model(batch)

    message = message_of(evaluate, RuntimeError)
    assert "'key'" in message and "without gradients" in message
    model(batch)
    plain(batch)
    assert_same(model.state_dict(), plain.state_dict(), "the state")


def test_write_in_a_forward_without_gradients_is_refused(pool2: Any) -> None:
    """One rank may run such a forward alone, so it cannot wait for the others."""
    pool2.run(evaluate_writing)


# --- .data ------------------------------------------------------------------------------------------


class Decaying(nn.Linear):
    """Writes to its weight through `.data`."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.5)
        return super().forward(x)


class Looking(nn.Linear):
    """Reads its weight through `.data`."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.weight.data.mean() * 0.0


def pair_of(kind: type[nn.Linear]) -> nn.Sequential:
    return nn.Sequential(kind(40, 40), kind(40, 40))


def backward_of_ones(model: nn.Module, rank: int) -> None:
    model(torch.ones(4, 40) * (rank + 1)).square().mean().backward()


@pytest.mark.parametrize(
    ("kind", "combinations"), [(Looking, COMBINATIONS), (Decaying, [("no_shard", "shm")])]
)
def test_data_in_forward(pool2: Any, kind, combinations) -> None:
    """Reading is right everywhere; writing is right where nothing is sharded."""
    build = functools.partial(pair_of, kind)
    policy = {kind}
    pool2.run(check_mean_grads, build, backward_of_ones, True, combinations, policy)


@pytest.mark.parametrize("combination", [c for c in COMBINATIONS if c[0] != "no_shard"])
@on_ranks(2)
def test_write_to_data_in_forward_is_refused(combination):
    """The write is refused, and no rank's parameters change."""
    model = wrapped(functools.partial(pair_of, Decaying), combination, auto_wrap_policy={Decaying})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    message = message_of(lambda: backward_of_ones(model, dist.get_rank()), RuntimeError)
    assert "was modified in place" in message and "p.data" in message
    model.zero_grad()
    assert_same(model.state_dict(), before, "the state")


# --- torch.nn.utils.parametrize, as PEFT's `target_parameters` uses it -------------------------------


class Plus(nn.Module):
    def __init__(self, change: Tensor) -> None:
        super().__init__()
        self.change = change

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.change


class LoraOnParameter(nn.Module):
    """What PEFT puts around a module that has experts' weights, a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, 300)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 300, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        trains = self.base.weight.requires_grad
        change = self.up.weight @ self.down.weight
        parametrize.register_parametrization(self.base, "weight", Plus(change))
        self.base.parametrizations.weight.original.requires_grad_(trains)
        try:
            made: Tensor = self.base(x)
            return made
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


class Setting(nn.Module):
    """Its forward calls `weight.set_()` with itself, an alias or a copy."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 300)
        self.source = source

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        with torch.no_grad():
            if self.source == "copy":
                weight.set_(weight * 2)
            else:
                weight.set_(weight if self.source == "itself" else weight.detach())
        return F.linear(x, weight, self.layer.bias)


def frozen() -> nn.Module:
    model = LoraOnParameter()
    model.base.requires_grad_(False)
    return model


@pytest.mark.parametrize("build", [LoraOnParameter, frozen])
def test_parametrization_in_forward(pool2: Any, build) -> None:
    pool2.run(check_mean_grads, build, forward_backward, True)


@pytest.mark.parametrize("source", ["itself", "alias"])
def test_set_to_own_memory_changes_nothing(pool2: Any, source) -> None:
    pool2.run(check_mean_grads, functools.partial(Setting, source), forward_backward, True)


@on_ranks(2)
def test_set_to_other_memory_is_refused():
    model = wrapped(functools.partial(Setting, "copy"), FULL)
    said = message_of(lambda: forward_backward(model, 0), RuntimeError)
    assert "layer.weight" in said and "replaced" in said


class Greedy(nn.Module):
    """Trains each layer by a loss of its own, and continues with what the new weights compute."""

    def __init__(self, custom: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))  # of the unit whose forward runs
        self.custom = custom

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for turn, (layer, optimizer) in enumerate(self.steps()):
            loss = layer(x).square().mean() + self.scale.square().sum()
            loss.backward()
            lag(turn)
            optimizer.step()
            optimizer.zero_grad()
            x = torch.tanh(layer(x.detach())) * self.scale
        return x

    def steps(self) -> list[tuple[nn.Module, Any]]:
        if "optimizers" not in vars(self):
            kind: Any = Decayed if self.custom else torch.optim.AdamW
            self.optimizers = (
                kind([*self.first.parameters(), self.scale], lr=0.05),
                zshard.SGD(self.second.parameters(), lr=0.05, momentum=0.9),
            )
        return list(zip((self.first, self.second), self.optimizers, strict=True))


class Decayed(torch.optim.Optimizer):
    """An optimizer of a script, whose operations on shards the guard sees."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            sums = self.state[param].setdefault("sums", torch.zeros(param.shape))
            sums.mul_(0.9).add_(param.grad + param * 0.01)
            param.sub_(sums * self.param_groups[0]["lr"])


def train_greedily(custom: bool, combination: tuple[str, str]) -> None:
    strategy, transport = combination
    plain = make(functools.partial(Greedy, custom))
    model = FSDP(
        copy.deepcopy(plain), strategy=strategy, transport=transport, auto_wrap_policy={nn.Linear}
    )
    for batch in torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(0)):
        assert_same(model(batch).detach(), plain(batch).detach(), "the output")
    assert_same(model.state_dict(), plain.state_dict(), "the state")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("combination", [*COMBINATIONS, *HYBRID])
@pytest.mark.parametrize("custom", [False, True], ids=["torch's", "a script's"])
def test_step_within_a_forward(pool2: Any, custom, combination) -> None:
    """All ranks have stepped before any of them reads the new weights, and none writes while
    another reads."""
    pool2.run(train_greedily, custom, combination)
