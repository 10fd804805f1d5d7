"""The ResNet of resnet.py, trained by Lightning: `Trainer(strategy="zshard")`.

    torchrun --standalone --nproc-per-node 2 examples/resnet_lightning.py --strategy full_shard

With `--strategy ddp` this is `Trainer(strategy="ddp")`. Needs the extra `trainers`.
"""

import time
from typing import Any

import common
import resnet
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import zshard.lightning

EXPECTED = resnet.EXPECTED


class Classifier(LightningModule):
    """The ResNet, as Lightning trains it."""

    def __init__(self, run: common.Run) -> None:
        super().__init__()
        self.run, self.resnet = run, resnet.ResNet(width=8 if run.quick else 32)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        torch.manual_seed(self.run.seed_of(self.global_step))
        images, labels = batch
        return F.cross_entropy(self.resnet(common.distorted(images)), labels)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        images, labels = batch
        right = (self.resnet(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True, batch_size=len(labels))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters(), **resnet.SGD)
        steps = self.run.args.steps
        cycle = OneCycleLR(optimizer, resnet.SGD["lr"], steps, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


class Report(Callback):
    """Hands a rank's losses and times of steps to the report."""

    def __init__(self, run: common.Run) -> None:
        self.run = run

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.run.first = trainer.global_step

    def on_train_batch_start(self, *_: Any) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.run.seconds.append(time.perf_counter() - self.began)
        self.run.log(outputs["loss"])


def fit(
    run: common.Run, module: LightningModule, training: DataLoader, held_out: DataLoader
) -> float:
    """Train as the flags say, and return the mean of the module's "accuracy" in the log.

    Lightning gives each rank its own batches of the loaders.
    """
    args = run.args
    strategy: Any = "ddp"
    if args.strategy != "ddp":
        strategy = zshard.lightning.ZShardStrategy(strategy=args.strategy)
    saving = [ModelCheckpoint(args.save, every_n_train_steps=args.save_every, save_top_k=-1)]
    run.note(module)
    trainer = Trainer(
        accelerator="cpu",
        devices=run.world,
        strategy=strategy,
        max_steps=args.stop_after,
        callbacks=[Report(run), *(saving if args.save else [])],
        enable_checkpointing=bool(args.save),
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir="build/lightning",
    )
    trainer.fit(module, training, ckpt_path=common.newest(args.resume, "*.ckpt"))
    (found,) = trainer.validate(module, held_out, verbose=False)
    return found["accuracy"]


def train(run: common.Run) -> None:
    known, held_out = common.digits()
    training = DataLoader(TensorDataset(*known), resnet.BATCH, shuffle=True)
    reached = fit(
        run, Classifier(run), training, DataLoader(TensorDataset(*held_out), resnet.BATCH)
    )
    baseline = resnet.most_frequent(held_out[1])
    run.result("held-out accuracy", reached, expected=EXPECTED, baseline=baseline)


if __name__ == "__main__":
    common.main(__doc__, train, steps=120)
