"""LightningModules for trainers' tests, and the start of their ranks.

Each run records everything that a user could see (losses, logged values, full weights), so that a
test can compare it with the same run of Lightning's own DDP.
"""

from __future__ import annotations

import os
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

    def __init__(self) -> None:
        super().__init__()
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
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


class Loose(Net):
    """A Net with a buffer that its checkpoints lack."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("more", torch.ones(2))
        self.strict_loading = False


class OwnNames(Net):
    """A Net that has FSDP's names, as values that a strategy must not read."""


refuse(OwnNames)


class OwnAdamW(Net):
    """A Net with zshard's optimizer."""

    def configure_optimizers(self) -> Any:
        return zshard.AdamW(self.parameters(), lr=0.05)


class EarlyOptimizer(Net):
    """A Net whose optimizer has two groups, of parameters before sharding."""

    def configure_optimizers(self) -> Any:
        return self.early

    def __init__(self) -> None:
        super().__init__()
        groups = [[p for p in self.parameters() if (p.ndim > 1) is big] for big in (True, False)]
        self.early = torch.optim.AdamW([{"params": group} for group in groups], lr=0.05)


class Late(Net):
    """A Net whose layers configure_model() creates, for zshard on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = None

    def configure_model(self) -> None:
        if self.blocks is None:
            with torch.device("meta" if is_ours(self.trainer.strategy) else "cpu"):
                self.blocks = nn.Sequential(*[Block() for _ in range(3)])
                self.head = nn.Linear(DIM, 1)


class Gan(LightningModule):
    """Two networks, each with an optimizer, which training_step() calls and steps itself."""

    toggles = True

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
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

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        nets, rates = (self.generator, self.parts), (0.01, 0.02)
        pairs = zip(nets, rates, strict=True)
        return [torch.optim.Adam(net.parameters(), rate) for net, rate in pairs], []


class GanWithoutToggles(Gan):
    toggles = False


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
    """A module that calls zshard.FSDP itself, where it may."""

    def configure_model(self) -> None:
        if is_ours(self.trainer.strategy) and not isinstance(self.blocks, zshard.FSDP):
            zshard.FSDP(self.blocks)


class EarlyUnit(Net):
    """A module that calls zshard.FSDP itself, before Lightning starts the ranks."""

    def __init__(self) -> None:
        super().__init__()
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


QUIET = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
AS_TORCHRUN = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
RANKS: dict[str, Any] = {"fresh": True, "env": AS_TORCHRUN, "timeout": 200}  # of on_ranks()


def trainer(strategy: Any, devices: int = 0, **options: Any) -> Trainer:
    """Return a Trainer. strategy: a name, or arguments of zshard's. devices: 0 for all ranks."""
    seed_everything(3, verbose=False)
    if isinstance(strategy, dict):
        strategy = zshard.lightning.ZShardStrategy(**strategy)
    options = {"accelerator": "cpu", **QUIET, "max_epochs": 1, **options}
    devices = devices or int(os.environ["WORLD_SIZE"])
    return Trainer(strategy=strategy, devices=devices, **options)


def is_ours(strategy: Any) -> bool:
    return isinstance(strategy, zshard.lightning.ZShardStrategy)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def run_on_ranks(function: Any, *args: Any, world: int = 2) -> list[Any]:
    """Return [function(*args) of each rank], started as torchrun does."""
    done = fork_ranks(function, world, *args, env=AS_TORCHRUN, check=True, timeout=200)
    return [each.value for each in done]
