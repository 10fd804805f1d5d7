"""Accelerate's LocalSGD averages parameters, so replicas train as under DDP and shards are
refused."""

from __future__ import annotations

import pytest
import torch
from spawn import on_ranks

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


@on_ranks(2)
def test_replicas_train_as_under_ddp():
    (theirs, their_state), (ours, our_state) = train(None), train("no_shard")
    assert theirs == ours and equal(their_state, our_state)


@on_ranks(2)
def test_shards_are_not_averaged():
    with pytest.raises(zshard.ShardError) as caught:
        train("full_shard")
    message = str(caught.value)
    assert "all_reduce() was called on a shard" in message
    assert "full_tensor" in message
