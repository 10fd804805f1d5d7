"""LightningModules that trainers' tests train, and how their ranks start.

The one idea: each run notes what a user could see (losses, logged values, full weights), so that a
test compares one run with the same run of Lightning's own DDP.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from nursery import fork_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zshard.lightning  # noqa: F401 - registers the strategy

DIM = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class Net(LightningModule):
    """Blocks, and a head that training_step() uses itself; it notes its losses."""

    def __init__(self, lr: float = 0.05, optimizer: str = "AdamW") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.blocks = nn.Sequential(*[Block() for _ in range(3)])
        self.head = nn.Linear(DIM, 1)
        self.scale = nn.Parameter(torch.ones(3))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)) * self.scale[0]

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return (self(x).squeeze(1) - y).square().mean() + self.scale.square().sum() * 0.01

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self(batch[0]) * self.scale[1]

    def configure_optimizers(self) -> Any:
        made = getattr(torch.optim, self.hparams["optimizer"])(
            self.parameters(), lr=self.hparams["lr"]
        )
        return [made], [torch.optim.lr_scheduler.StepLR(made, 2, 0.5)]


def data(rows: int = 64, batch: int = 4) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(rows, DIM, generator=draw)
    return DataLoader(TensorDataset(x, x.sum(1).sin()), batch_size=batch)


QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def trainer(strategy: Any, devices: int, **options: Any) -> Trainer:
    seed_everything(3, verbose=False)
    return Trainer(strategy=strategy, devices=devices, **{**QUIET, "max_epochs": 1, **options})


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def on_ranks(function: Any, world: int, *args: Any, **options: Any) -> list[Any]:
    """[function(world, *args) of each rank], as torchrun starts them."""
    env = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
    done = fork_ranks(function, world, world, *args, env=env, check=True, timeout=120, **options)
    return [each.value for each in done]
