"""torch.nn.utils.prune on a sharded model: refused on all ranks, also where one has no elements.

What the error tells to do gives the plain model's values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_same, differences
from models import COMBINATIONS
from scenarios import message_of
from spawn import RankPool, ranks
from torch import nn
from torch.nn.utils import prune

import zshard
from zshard import FSDP

WAYS: dict[str, Callable[[Any], Any]] = {
    "l1": lambda m: prune.l1_unstructured(m[0], "weight", amount=0.5),
    "random": lambda m: prune.random_unstructured(m[0], "bias", amount=1),
    "structured": lambda m: prune.random_structured(m[0], "weight", amount=0.5, dim=0),
    "identity": lambda m: prune.identity(m[0], "weight"),
    "mask": lambda m: prune.custom_from_mask(m[0], "weight", torch.ones(4, 4)),
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 64))


def refusals(combination: tuple[str, str]) -> list[str]:
    strategy, transport = combination
    options: Any = {"strategy": strategy, "transport": transport, "auto_wrap_policy": {nn.Linear}}
    made = FSDP(model(), **options)
    ways = [functools.partial(way, made) for way in WAYS.values()]
    found = [message_of(way, zshard.ShardError) for way in (*ways, *ways)]
    before = dict(model().named_parameters())
    assert differences(made.state_dict(), before) == []

    pruned = model()
    prune.l1_unstructured(pruned[0], "weight", amount=0.5)
    early = FSDP(pruned, **options)
    plain = model()
    prune.l1_unstructured(plain[0], "weight", amount=0.5)
    assert_same(early(torch.ones(2, 4)), plain(torch.ones(2, 4)), "the output")
    with FSDP.summon_full_params(made), torch.no_grad():
        made[0].weight[:2] = 0
    assert_same(made.state_dict()["0.weight"][:2], torch.zeros(2, 4), "rows set to zero")
    prune.l1_unstructured(nn.Linear(2, 2), "weight", amount=0.5)
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("combination", COMBINATIONS)
@ranks(2)
def test_it_is_refused_on_all_ranks(pool: RankPool, combination: tuple[str, str]) -> None:
    for found in pool.run(refusals, combination):
        for text in found:
            assert "pruning replaces parameter '0." in text and "before FSDP(...)" in text
