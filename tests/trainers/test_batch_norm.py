"""Batch norms under trainers' adapters: each rank evaluates with the same statistics as under DDP.

The same run with the trainer's own DDP and with zshard, with evaluation metrics on each rank in
between; and rank 0 evaluates alone.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerated import fork_trainers
from compare import assert_same
from torch import nn
from torch.nn import functional as F

ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8)]
        self.layers = nn.Sequential(*layers, nn.Linear(8, 1))

    def forward(self, x: Any = None, labels: Any = None) -> Any:
        output = self.layers(x)
        return output if labels is None else {"loss": F.mse_loss(output, labels), "out": output}


def rows(step: int, rank: int, n: int = 6) -> Any:
    draw = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(n, 8, generator=draw)
    return x, x.sum(1, keepdim=True).sin()


def loop(model: Any, optimizer: Any, backward: Any, accumulate: Any, alone: Any) -> list[float]:
    """Return metrics of this rank's evaluations, each after two batches."""
    metrics, rank = [], dist.get_rank()
    for step in range(8):
        with accumulate(step):
            x, y = rows(step, rank)
            backward(F.mse_loss(model(x), y))
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                metrics.append(F.mse_loss(model(rows(9, rank)[0]), rows(9, rank)[1]).item())
                if rank == 0 and alone is not None:
                    alone(rows(9, 0)[0])
            model.train()
    return metrics


def by_accelerate(strategy: str | None, within: bool) -> Any:
    from accelerated import Run

    run = Run(strategy, build=Normed)
    model, accelerator = run.model, run.accelerator

    def accumulate(step: int) -> Any:
        inside = within and step % 2 == 0
        return accelerator.no_sync(model) if inside else contextlib.nullcontext()

    metrics = loop(model, run.optimizer, accelerator.backward, accumulate, strategy and model)
    return metrics, run.state()


def by_fabric(strategy: str | None, within: bool) -> Any:
    from lightning.fabric import Fabric

    import zshard.lightning

    ours = zshard.lightning.ZShardFabricStrategy(strategy=strategy or "full_shard")
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ours if strategy else "ddp")
    fabric.launch()
    plain = Normed()
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), 0.1))

    def accumulate(step: int) -> Any:
        return fabric.no_backward_sync(model, enabled=within and step % 2 == 0)

    found = loop(model, optimizer, fabric.backward, accumulate, strategy and model)
    return found, dict(model.state_dict())


def by_lightning(strategy: str | None, within: bool) -> Any:
    from lightning_runs import LightningModule, trainer
    from torch.utils.data import DataLoader, TensorDataset

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Normed()
            self.metrics: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            return F.mse_loss(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            loss = F.mse_loss(self.net(batch[0]), batch[1])
            self.metrics.append(loss.item())
            self.log("val", loss, sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    loader = DataLoader(TensorDataset(*rows(0, 0, 48)), batch_size=4)
    options = {"max_epochs": 2, "val_check_interval": 3, "num_sanity_val_steps": 0}
    options["accumulate_grad_batches"] = 2 if within else 1
    run = trainer({"strategy": strategy} if strategy else "ddp", **options)
    module = Module()
    run.fit(module, loader, loader)
    return [*module.metrics, float(run.callback_metrics["val"])], dict(module.state_dict())


def by_transformers(strategy: str | None, within: bool) -> Any:
    from hf_trainers import arguments, new_run, trainer_of
    from transformers import Trainer

    new_run()
    pairs = [rows(i, 0, 1) for i in range(48)]
    data = [{"x": x[0], "labels": y[0]} for x, y in pairs]
    steps = {"max_steps": 8, "eval_strategy": "steps", "eval_steps": 2}
    args = arguments(".", gradient_accumulation_steps=2 if within else 1, **steps)
    trainer = trainer_of(
        Trainer, strategy, args, model=Normed(), train_dataset=data, eval_dataset=data
    )
    trainer.train()
    metrics = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    return metrics, dict(trainer.model.state_dict())


RUNS: dict[str, tuple[Any, str]] = {
    "accelerate": (by_accelerate, "accelerate"),
    "lightning": (by_lightning, "lightning"),
    "fabric": (by_fabric, "lightning"),
    "transformers": (by_transformers, "accelerate"),
}


def run(name: str, strategy: str | None, within: bool, folder: Path) -> Any:
    with contextlib.chdir(folder):
        metrics, state = RUNS[name][0](strategy, within)
    return {"metrics": metrics, **{key: value.clone() for key, value in state.items()}}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("within", [False, True], ids=["each", "accumulated"])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("name", RUNS)
def test_metrics_and_weights_match_ddp(
    name: str, strategy: str, transport: str, within: bool, tmp_path: Path
) -> None:
    pytest.importorskip(RUNS[name][1], reason="needs zshard[trainers]: make test-trainers")
    if transport == "c10d" and strategy == "full_shard" and name in ("accelerate", "fabric"):
        pytest.skip("rank 0 cannot evaluate alone there")
    env = {**ENVIRONMENT, "ZSHARD_TRANSPORT": transport, "ZSHARD_TIMEOUT": "60"}
    theirs, ours = (
        fork_trainers(run, name, kind, within, tmp_path, env=env) for kind in (None, strategy)
    )
    for mine, other in zip(ours, theirs, strict=True):
        named = {key.removeprefix("module."): value for key, value in other.items()}
        assert_same(mine, named, "the run")
