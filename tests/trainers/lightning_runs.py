"""LightningModules for trainers' tests, and how their ranks start.

Each run records what a user could see (losses, logged values, full weights), so that a test can
compare it with the same run of Lightning's own DDP.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from nursery import fork_ranks
from own_names import refuse
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zshard.lightning

DIM = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class Net(LightningModule):
    """Blocks, and a head that training_step() uses itself; records its losses."""

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


class Loose(Net):
    """A Net with a buffer that its checkpoints lack."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("more", torch.ones(2))
        self.strict_loading = False


class OwnNames(Net):
    """A Net that has FSDP's names itself, for what a strategy must not read."""


refuse(OwnNames)


class Late(Net):
    """A Net whose layers configure_model() creates."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.late_on = device
        self.blocks = None

    def configure_model(self) -> None:
        if self.blocks is not None:
            return
        with torch.device(self.late_on):
            self.blocks = nn.Sequential(*[Block() for _ in range(3)])
            self.head = nn.Linear(DIM, 1)


class Gan(LightningModule):
    """Two networks, each with an optimizer, which training_step() calls and steps itself."""

    def __init__(self, toggles: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggles = toggles
        self.generator = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
        critic = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, 1))
        self.parts = nn.ModuleDict({"critic": critic})
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.generator(x)

    def training_step(self, batch: Any, index: int) -> None:
        x, critic = batch[0], self.parts["critic"]
        generating, judging = self.optimizers()
        self.update(generating, lambda: -critic(self(x * 0.5)).mean())
        self.update(judging, lambda: critic(self(x * 0.5).detach()).mean() - critic(x).mean())

    def update(self, optimizer: Any, closure: Any) -> None:
        if self.toggles:
            self.toggle_optimizer(optimizer)
        loss = closure()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.5, "value")
        optimizer.step()
        if self.toggles:
            self.untoggle_optimizer(optimizer)
        self.losses.append(loss.item())
        self.log("loss", loss)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.parts["critic"](self(batch[0])).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), 0.01),
            torch.optim.Adam(self.parts.parameters(), 0.02),
        ], []


class FrozenAndUnused(Net):
    """With a frozen block, a frozen layer, an unused layer, and a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(DIM)
        self.unused = nn.Linear(DIM, DIM)
        self.frozen = nn.Linear(DIM, DIM).requires_grad_(False)
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch_norm(self.frozen(x)))


class OwnUnit(Net):
    """A module that calls zshard.FSDP itself."""

    def __init__(self, where: str = "init") -> None:
        super().__init__()
        self.where = where
        if where == "init":
            zshard.FSDP(self.blocks)

    def configure_model(self) -> None:
        if self.where == "configure_model" and not isinstance(self.blocks, zshard.FSDP):
            zshard.FSDP(self.blocks)


class FailsOnRank1(Net):
    def training_step(self, batch: Any, index: int) -> Tensor:
        if index == 2 and self.global_rank == 1:
            raise RuntimeError("boom on rank 1")
        return super().training_step(batch, index)


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


def strategy_of(given: Any) -> Any:
    """Return a strategy by name, or zshard's with a dict of arguments."""
    return zshard.lightning.ZShardStrategy(**given) if isinstance(given, dict) else given


def trainer(strategy: Any, devices: int, **options: Any) -> Trainer:
    seed_everything(3, verbose=False)
    strategy = strategy_of(strategy)
    return Trainer(strategy=strategy, devices=devices, **{**QUIET, "max_epochs": 1, **options})


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def on_ranks(function: Any, world: int, *args: Any, **options: Any) -> list[Any]:
    """Return [function(world, *args) of each rank], started as torchrun does."""
    env = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
    done = fork_ranks(function, world, world, *args, env=env, check=True, timeout=200, **options)
    return [each.value for each in done]
