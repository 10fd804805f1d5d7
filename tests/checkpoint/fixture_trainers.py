"""Runs of Accelerate, of a Trainer of transformers and of Lightning that resume from fixtures/.
Ranks are forks of a process that has imported all three."""

from __future__ import annotations

import os
import random
from typing import Any

import accelerate
import fixed_values as fixed
import torch
from compare import assert_same
from fixed_values import FOLDER, Saved, rank, world
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim.lr_scheduler import StepLR
from transformers import Trainer as TransformersTrainer
from transformers import TrainerCallback, TrainingArguments

import zshard
import zshard.accelerate
import zshard.lightning
import zshard.transformers

# The learning rates that StepLR has left: Accelerate steps it once for each of two ranks.
OF_ACCELERATE, OF_LIGHTNING = fixed.LR / 2**4, fixed.LR / 2**2


# --- Accelerate -----------------------------------------------------------------------------------


class Counter:
    """An object that a script registers for its checkpoints."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def resume_accelerate(folder: str) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    zshard.accelerate.shard(accelerator)
    model = fixed.net()
    optimizer = torch.optim.AdamW(model.parameters(), **fixed.ADAMW)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    scheduler = StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.load_state(str(FOLDER / folder))
    assert fixed.is_seeded(rank()) or rank() >= 2
    fixed.check(accelerator.unwrap_model(model), optimizer.optimizer, Saved(lr=OF_ACCELERATE))
    assert scheduler.scheduler.last_epoch == 2 * fixed.STEPS
    assert_same(counter.state, {"seen": torch.arange(3), "epoch": 7}, "the counter")


# --- transformers ---------------------------------------------------------------------------------


class Named(fixed.Untied):
    """A model as a Trainer calls it."""

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        return {"loss": super().forward(x)}


class LookAtTrainer(TrainerCallback):
    seen: tuple[Any, ...] = ()

    def on_train_begin(self, *_: Any, model: Any, optimizer: Any, lr_scheduler: Any, **__: Any):
        fixed.check_model(model)
        state = fixed.adam_state(fixed.Untied)
        fixed.check_optimizer(model, getattr(optimizer, "optimizer", optimizer), state, 0.0)
        self.seen += (lr_scheduler.last_epoch,)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        expected = random.Random(fixed.SEED + rank()).getstate()
        self.seen += (random.getstate() == expected or rank() >= 2,)


def resume_transformers(folder: str) -> None:
    os.chdir(folder)
    look = LookAtTrainer()
    options: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
    options |= {"learning_rate": fixed.LR, "adam_beta1": 0.5, "adam_beta2": 0.75}
    options |= {"max_grad_norm": 0.0, "logging_strategy": "no", "optim": "adamw_torch"}
    options |= {"save_strategy": "steps", "save_steps": fixed.STEPS, "max_steps": fixed.STEPS + 1}
    trainer = zshard.transformers.shard(TransformersTrainer)(
        model=Named(),
        args=TrainingArguments(output_dir="out", per_device_train_batch_size=2, **options),
        train_dataset=[{"x": [1.0, 1.0, 1.0]}] * 64,
        callbacks=[look],
    )
    trainer.train(resume_from_checkpoint=str(FOLDER / "transformers" / "out" / "checkpoint-2"))
    assert look.seen == (fixed.STEPS, True) and trainer.state.global_step == fixed.STEPS + 1


# --- Lightning ------------------------------------------------------------------------------------


class Lit(fixed.Net, LightningModule):
    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), **fixed.ADAMW)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step"}]

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(64, 3), batch_size=2)


class LookAtLightning(Callback):
    seen: tuple[int, ...] = ()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        fixed.check(pl_module, trainer.optimizers[0], Saved(lr=OF_LIGHTNING))
        self.seen += (trainer.global_step,)


def resume_lightning() -> None:
    look = LookAtLightning()
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False}
    options |= {"enable_checkpointing": False, "enable_model_summary": False, "accelerator": "cpu"}
    for kind in ("full", "sharded"):
        strategy = zshard.lightning.ZShardStrategy(state_dict_type="full")
        options |= {"strategy": strategy, "devices": world(), "max_steps": fixed.STEPS + 1}
        trainer = Trainer(callbacks=[look], **options)
        trainer.fit(Lit(), ckpt_path=str(FOLDER / "lightning" / f"{kind}.ckpt"))
    assert look.seen == (fixed.STEPS,) * 2
