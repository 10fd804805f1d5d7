"""Histograms of a sharded model, with the lines of docs/trainers.md: full values, from real loggers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from spawn import RankPool
from torch import nn

import zshard
from zshard import FSDP, ShardError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trainers.md"
SECTION = PAGE.read_text().split("\n## Histograms")[1]
CODE = [part.split("```")[0] for part in SECTION.split("```python\n")[1:]]


def model() -> nn.Module:
    torch.manual_seed(0)
    made = FSDP(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)))
    made(torch.ones(2, 40)).sum().backward()
    return made


def in_tensorboard(folder: str) -> list[str]:
    """Return the histograms whose number of elements differs from the full parameters'."""
    os.chdir(folder)
    sharded = model()
    names: dict[str, object] = {"model": sharded}
    exec(CODE[0], names)
    writer = names["writer"]
    if writer is None:
        return []
    writer.close()  # type: ignore[attr-defined]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator("runs", size_guidance={"histograms": 0})
    events.Reload()
    sizes = {
        tag: events.Histograms(tag)[0].histogram_value.num for tag in events.Tags()["histograms"]
    }
    full = {name: zshard.shard_info(p) for name, p in sharded.named_parameters()}
    assert sizes.keys() == full.keys()
    return [n for n, info in full.items() if info and sizes[n] != torch.Size(info["shape"]).numel()]


def test_tensorboard(pool2: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs zshard[trainers]: make test-trainers")
    assert pool2.run(in_tensorboard, str(tmp_path)) == [[], []]


def in_wandb(folder: str) -> list[str]:
    """Return the histograms whose number of elements differs from the full parameters'."""
    os.environ["WANDB_SILENT"] = "true"
    import wandb

    sharded = model()
    rank = torch.distributed.get_rank()
    run = wandb.init(mode="offline", project="test", dir=folder) if rank == 0 else None
    exec(CODE[1], {"model": sharded, "rank": rank, "wandb": wandb, "zshard": zshard})
    if run is None:
        return []
    wandb.log({"step": 0})
    logged = {
        n: sum(run.summary[f"gradients/{n}"]["values"]) for n, _ in sharded.named_parameters()
    }
    infos = {name: zshard.shard_info(p) for name, p in sharded.named_parameters()}
    run.finish()
    return [n for n, i in infos.items() if i and logged[n] != torch.Size(i["shape"]).numel()]


def test_wandb(pool2: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs wandb")
    assert pool2.run(in_wandb, str(tmp_path)) == [[], []]


def watched(folder: str) -> str:
    """Return the error of wandb.watch() on the rank that logs, once gradients come."""
    os.environ["WANDB_SILENT"] = "true"
    import wandb

    run = wandb.init(mode="offline", project="test", dir=folder)
    sharded = FSDP(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)))
    try:
        wandb.watch(sharded, log="all", log_freq=1)
        sharded(torch.ones(2, 40)).sum().backward()
    except ShardError as error:
        return str(error)
    finally:
        run.finish()
    return "no error"


def test_wandb_watch_error_names_the_remedy(pool2: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs wandb")
    for message in pool2.run(watched, str(tmp_path)):
        assert "zshard.full_tensor" in message
