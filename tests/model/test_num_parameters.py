"""The number of parameters equals the plain model's, on all ranks, in every common way to count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import COMBINATIONS
from spawn import RankPool, on_ranks, ranks
from torch import nn

import zshard
from zshard import FSDP


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 7)
        self.layers = nn.Sequential(*[nn.Linear(7, 7) for _ in range(3)])
        self.layers[1].requires_grad_(False)
        self.head = nn.Linear(7, 11)
        self.head.weight = self.emb.weight
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x: Any) -> Any:
        return self.head(self.layers(self.emb(x)))


def counts(model: Any) -> list[int]:
    parts = (model, model.layers, model.layers[1], nn.ModuleDict({"of both": model}))
    return [
        zshard.num_parameters(part, trainable_only=only) for part in parts for only in (False, True)
    ]


def during_training(combination: tuple[str, str]) -> Any:
    strategy, transport = combination
    model: Any = FSDP(Tied(), strategy=strategy, transport=transport, auto_wrap_policy={nn.Linear})
    found = [counts(model)]
    model(torch.arange(4)).sum().backward()
    found.append(counts(model))
    with FSDP.summon_full_params(model):
        found.append(counts(model))
    with torch.no_grad():
        model(torch.arange(4))
    return [*found, counts(model)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("combination", COMBINATIONS)
@ranks(2)
def test_count_equals_the_plain_model(pool: RankPool, combination: tuple[str, str]) -> None:
    plain = Tied()
    total = sum(p.numel() for p in plain.parameters())
    expected = counts(plain)
    assert expected[:2] == [total, total - 56]
    assert pool.run(during_training, combination) == [[expected] * 4] * 2


class Counting(nn.Module):
    """Counts as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(7, 7)

    def num_parameters(self, only_trainable: bool = False) -> int:
        found = (p for _, p in self.named_parameters())
        return sum(p.numel() for p in found if p.requires_grad or not only_trainable)

    def forward(self, x: Any) -> Any:
        return self.part(x)


@on_ranks(2)
def test_non_unit_submodules_count_full_parameters():
    import zshard.integrations.transformers  # noqa: F401 - as FSDP() does if transformers is imported

    model: Any = FSDP(nn.Sequential(Counting(), Counting()), auto_wrap_policy=None)
    assert [model[0].num_parameters(), Counting().num_parameters()] == [56, 56]
