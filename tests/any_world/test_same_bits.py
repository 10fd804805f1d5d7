"""deterministic="any-world": one checksum for each number of ranks, strategy, transport, optimizer
and precision.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from any_world_training import Model, loss_of, make, train
from nursery import fork_ranks
from spawn import RankPool, on_ranks

from zshard import FSDP

STRATEGIES = ("full_shard", "shard_grad_op", "zero1", "no_shard")

Numbers = tuple[dict[tuple[int, int], float], str]


def train_here(options: dict[str, Any]) -> Any:
    return train(**options)


def merged(results: list[Numbers]) -> Numbers:
    """Return all ranks' losses, and the digest that all ranks must have."""
    losses: dict[tuple[int, int], float] = {}
    for mine, digest in results:
        assert all(losses.get(key, loss) == loss for key, loss in mine.items())
        losses |= mine
        assert digest == results[0][1]
    return losses, results[0][1]


@pytest.fixture(scope="module")
def alone() -> Callable[..., Numbers]:
    """The numbers of one rank without sharding, computed once."""
    known: dict[str, Numbers] = {}

    def numbers(**options: Any) -> Numbers:
        key = repr(sorted(options.items()))
        if key not in known:
            (result,) = fork_ranks(train_here, 1, {"strategy": "no_shard", **options}, check=True)
            known[key] = merged([result.value])
        return known[key]

    return numbers


CELLS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [  # ranks, the way, and the model
    (world, {"strategy": strategy, "transport": transport}, {})
    for world in (2, 3, 4)
    for strategy in STRATEGIES
    for transport in ("shm", "c10d")
]
CELLS += [(1, {"strategy": strategy}, {}) for strategy in STRATEGIES]
CELLS += [(world, {}, {"micro_batches": n}) for n in (4, 5, 7) for world in (2, 3, 4)]
CELLS += [
    (world, {"strategy": strategy}, {"optimizer": optimizer})
    for optimizer in ("adamw 8 bit", "torch's momentum", "muon")
    for world in (2, 3)
    for strategy in ("full_shard", "no_shard")
]
CELLS += [(3, {}, {"bf16": True}), (2, {"strategy": "no_shard"}, {"bf16": True})]
CELLS += [
    (4, {"strategy": strategy, "per_host": 2}, {})
    for strategy in ("full_shard", "hybrid_shard", "hybrid_shard_zero2", "hybrid_full")
]
CELLS += [(4, {"strategy": "zero1", "per_host": 1}, {})]


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("world", "how", "what"), CELLS, ids=str)
def test_any_cell_has_the_numbers_of_one_rank(
    pools: dict[int, RankPool],
    alone: Callable[..., Numbers],
    world: int,
    how: dict[str, Any],
    what: dict[str, Any],
) -> None:
    options = {**how, **what}
    if "per_host" in how:  # which ranks would remember
        forked = fork_ranks(train_here, world, options, timeout=120, check=True)
        results = [result.value for result in forked]
    else:
        results = pools.setdefault(world, RankPool(world)).run(train_here, options)
    assert merged(results) == alone(**what)


@on_ranks(2)
def test_memory_of_gradients_is_predicted() -> None:
    for micro_batches, strategy in product([2, 3, 7, 16], ["full_shard", "no_shard"]):
        model = make(micro_batches, strategy=strategy)
        predicted = model.memory("predicted")["grads"]
        for index in model.micro_batches(0):
            loss_of(model, 0, index).backward()
        peak = model.memory("peak")["grads"]
        # `never` and `seldom` have few
        assert 0 <= predicted - peak <= predicted // 4, (micro_batches, strategy)


@on_ranks(3)
def test_the_sum_is_that_of_a_tree() -> None:
    """Plain PyTorch's results, added in the same order."""
    model = make(5)
    for index in model.micro_batches(0):
        loss_of(model, 0, index).backward()
    torch.manual_seed(0)
    plain = Model().eval()
    model.zero_grad()
    model.eval()
    for index in model.micro_batches(0):
        loss_of(model, 0, index).backward()
    leaves = []
    for index in range(5):
        plain.zero_grad()
        loss_of(plain, 0, index).backward()
        leaves.append(
            {n: p.grad.clone() for n, p in plain.named_parameters() if p.grad is not None}
        )
    with FSDP.summon_full_params(model, with_grads=True):
        for name, param in model.named_parameters():
            a, b, c, d, e = (each.get(name, torch.zeros(())) for each in leaves)
            total = (((a + b) + (c + d)) + e) * (1 / 5)
            assert (param.grad is None) == (name.startswith("never")), name
            if param.grad is not None:
                assert torch.equal(param.grad, total.expand_as(param.grad)), name
