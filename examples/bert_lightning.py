"""The BERT of bert.py, trained by Lightning: `Trainer(strategy="zshard")`.

    torchrun --standalone --nproc-per-node 2 examples/bert_lightning.py --strategy full_shard

With `--strategy ddp` this is `Trainer(strategy="ddp")`. Needs the extra `trainers`.
"""

import bert
import common
import packages
import torch
from lightning.pytorch import LightningModule
from resnet_lightning import fit
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

EXPECTED = bert.EXPECTED


class Classifier(LightningModule):
    """BERT, as Lightning trains it."""

    def __init__(self, run: common.Run) -> None:
        super().__init__()
        self.bert = bert.bert(run.quick)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss: Tensor = self.bert(input_ids=batch[0], labels=batch[1]).loss
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        right = bert.accuracy(self.bert(input_ids=batch[0]).logits, batch[1])
        self.log("accuracy", right, sync_dist=True, batch_size=len(batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=bert.LR / 2)


def loader(run: common.Run, held_out: bool) -> DataLoader:
    samples = TensorDataset(*bert.data(run.quick, held_out))
    return DataLoader(samples, batch_size=bert.BATCH, shuffle=not held_out)


def train(run: common.Run) -> None:
    reached = fit(run, Classifier(run), loader(run, False), loader(run, True))
    chance = ("chance", 1 / len(packages.PACKAGES))
    run.result("held-out accuracy", reached, expected=EXPECTED, baseline=chance)


if __name__ == "__main__":
    common.main(__doc__, train, steps=150)
