"""Accelerate's LocalSGD averages parameters, so replicas train as under DDP and shards are
refused."""

from __future__ import annotations

import pytest
import torch
from spawn import RankPool, ranks

pytest.importorskip("accelerate", reason="needs zshard[trainers]: make test-trainers")

from accelerate.local_sgd import LocalSGD
from accelerated import Run, equal
from torch.nn import functional as F

import zshard


def train(strategy: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    run = Run(strategy)
    losses = []
    with LocalSGD(run.accelerator, run.model, local_sgd_steps=3) as local:
        for inputs, targets in run.loader:
            loss = F.mse_loss(run.model(inputs), targets)
            run.accelerator.backward(loss)
            run.optimizer.step()
            run.optimizer.zero_grad()
            local.step()
            losses.append(loss.item())
    return losses, run.state()


def compare() -> bool:
    (theirs, their_state), (ours, our_state) = train(None), train("no_shard")
    return theirs == ours and equal(their_state, our_state)


@ranks(2)
def test_replicas_train_as_under_ddp(pool: RankPool) -> None:
    assert pool.run(compare) == [True, True]


def refusal() -> str:
    with pytest.raises(zshard.ShardError) as caught:
        train("full_shard")
    return str(caught.value)


@ranks(2)
def test_shards_are_not_averaged(pool: RankPool) -> None:
    for message in pool.run(refusal):
        assert "all_reduce() was called on a shard" in message
        assert "full_tensor" in message
