"""Histograms of a sharded model, with the lines of docs/accelerate.md: full values, from real loggers."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
from pathlib import Path

import pytest
import torch
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, ShardError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "accelerate.md"
SECTION = PAGE.read_text().split("\n## Histograms")[1]
CODE = [part.split("```")[0] for part in SECTION.split("```python\n")[1:]]


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"needs {package}: make test-trainers")


def sharded_model() -> nn.Module:
    model = FSDP(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)))
    model(torch.ones(2, 40)).sum().backward()
    return model


def sizes_of(model: nn.Module) -> dict[str, int]:
    """Return the number of elements of each full parameter."""
    infos = {name: zshard.shard_info(param) for name, param in model.named_parameters()}
    return {name: math.prod(info["shape"]) for name, info in infos.items()}


@needs("tensorboard")
@on_ranks(2)
def test_tensorboard(tmp_path):
    model = sharded_model()
    names = {"model": model}
    with contextlib.chdir(tmp_path):
        exec(CODE[0], names)
        if names["writer"] is None:
            return
        names["writer"].close()
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator("runs", size_guidance={"histograms": 0})
        events.Reload()
    tags = events.Tags()["histograms"]
    assert {tag: events.Histograms(tag)[0].histogram_value.num for tag in tags} == sizes_of(model)


@needs("wandb")
@on_ranks(2)
def test_wandb(tmp_path):
    os.environ["WANDB_SILENT"] = "true"
    import wandb

    model, rank = sharded_model(), torch.distributed.get_rank()
    run = wandb.init(mode="offline", project="test", dir=tmp_path) if rank == 0 else None
    exec(CODE[1], {"model": model, "rank": rank, "wandb": wandb, "zshard": zshard})
    if run is not None:
        wandb.log({"step": 0})
        sizes = sizes_of(model)
        logged = {name: sum(run.summary[f"gradients/{name}"]["values"]) for name in sizes}
        run.finish()
        assert logged == sizes


@needs("wandb")
@on_ranks(2)
def test_wandb_watch_error_names_the_remedy(tmp_path):
    os.environ["WANDB_SILENT"] = "true"
    import wandb

    run = wandb.init(mode="offline", project="test", dir=tmp_path)
    model = FSDP(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)))
    wandb.watch(model, log="all", log_freq=1)
    with pytest.raises(ShardError, match=r"zshard\.full_tensor"):
        model(torch.ones(2, 40)).sum().backward()
    run.finish()
