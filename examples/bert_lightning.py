"""The BERT of bert.py, trained by Lightning: `Trainer(strategy="zshard")`.

    torchrun --standalone --nproc-per-node 2 examples/bert_lightning.py --strategy full_shard

With `--strategy ddp` this is `Trainer(strategy="ddp")`. Needs the extra `trainers`.
"""

import time
from typing import Any

import bert
import common
import packages
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import zshard.lightning

EXPECTED = bert.EXPECTED


class Classifier(LightningModule):
    """BERT, as Lightning trains it."""

    def __init__(self, run: common.Run) -> None:
        super().__init__()
        self.run, self.bert = run, bert.bert(run.quick)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.began = time.perf_counter()
        loss: Tensor = self.bert(input_ids=batch[0], labels=batch[1]).loss
        self.run.log(loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.run.seconds.append(time.perf_counter() - self.began)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        right = bert.accuracy(self.bert(input_ids=batch[0]).logits, batch[1])
        self.log("accuracy", right, sync_dist=True, batch_size=len(batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=bert.LR / 2)


def loader(run: common.Run, held_out: bool) -> DataLoader:
    """Batches, of which Lightning gives each rank its own."""
    samples = TensorDataset(*bert.data(run.quick, held_out))
    return DataLoader(samples, batch_size=bert.BATCH, shuffle=not held_out)


def train(run: common.Run) -> None:
    args = run.args
    strategy: Any = "ddp"
    if args.strategy != "ddp":
        strategy = zshard.lightning.ZShardStrategy(strategy=args.strategy)
    saving = [ModelCheckpoint(args.save, every_n_train_steps=args.save_every, save_top_k=-1)]
    module = Classifier(run)
    run.note(module)
    trainer = Trainer(
        accelerator="cpu",
        devices=run.world,
        strategy=strategy,
        max_steps=args.steps,
        callbacks=saving if args.save else [],
        enable_checkpointing=bool(args.save),
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir="build/bert_lightning",
    )
    trainer.fit(module, loader(run, False), ckpt_path=common.newest(args.resume, "*.ckpt"))
    (found,) = trainer.validate(module, loader(run, True), verbose=False)
    chance = ("chance", 1 / len(packages.PACKAGES))
    run.result("held-out accuracy", found["accuracy"], expected=EXPECTED, baseline=chance)


if __name__ == "__main__":
    common.main(__doc__, train, steps=150)
