"""What Accelerate, a Trainer of transformers and Lightning write to fixtures/, and how runs of these
resume there. Ranks are forks of a process that has imported all three."""

from __future__ import annotations

import os
import random
from pathlib import Path
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
    """What a script registers for its checkpoints."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def accelerated(shards: bool) -> tuple[Any, ...]:
    """Return an Accelerator, and what it has prepared: model, optimizer, scheduler, a counter."""
    accelerator = accelerate.Accelerator(cpu=True)
    if shards:
        zshard.accelerate.shard(accelerator)
    model = fixed.net()
    optimizer = torch.optim.AdamW(model.parameters(), **fixed.ADAMW)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return accelerator, *accelerator.prepare(model, optimizer, StepLR(optimizer, 1, 0.5)), counter


def save_with_accelerate(folder: Path, shards: bool) -> None:
    accelerator, model, optimizer, scheduler, counter = accelerated(shards)
    for _ in range(fixed.STEPS):
        accelerator.backward(model(torch.ones(2, 3)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.unwrap_model(model).load_state_dict(fixed.weights())
    counter.load_state_dict({"seen": torch.arange(3), "epoch": 7})
    fixed.seed_all(rank())
    accelerator.save_state(str(folder), safe_serialization=shards)


def save_accelerate(folder: Path) -> None:
    save_with_accelerate(folder, shards=True)


def save_accelerate_ddp(folder: Path) -> None:
    """Accelerate's own files, as pickles; zshard loads them into a sharded model."""
    save_with_accelerate(folder, shards=False)


def resume_accelerate(folder: str) -> None:
    accelerator, model, optimizer, scheduler, counter = accelerated(shards=True)
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


def transformers_trainer(steps: int, callback: Any) -> Any:
    """Return a Trainer in the current folder, which takes `steps` steps and saves after STEPS."""
    options: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
    options |= {"learning_rate": fixed.LR, "adam_beta1": 0.5, "adam_beta2": 0.75}
    options |= {"max_grad_norm": 0.0, "logging_strategy": "no", "optim": "adamw_torch"}
    options |= {"save_strategy": "steps", "save_steps": fixed.STEPS, "max_steps": steps}
    return zshard.transformers.shard(TransformersTrainer)(
        model=Named(),
        args=TrainingArguments(output_dir="out", per_device_train_batch_size=2, **options),
        train_dataset=[{"x": [1.0, 1.0, 1.0]}] * 64,
        callbacks=[callback],
    )


class Fill(TrainerCallback):
    def on_step_end(self, *args: Any, model: Any, **_: Any) -> None:
        model.load_state_dict(fixed.weights())
        fixed.seed_all(rank())


def save_transformers(folder: Path) -> None:
    os.chdir(folder)  # so that no path of this machine is saved
    transformers_trainer(fixed.STEPS, Fill()).train()


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
    trainer = transformers_trainer(fixed.STEPS + 1, look)
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


def lightning_trainer(kind: str, steps: int, **options: Any) -> Any:
    """Return Lightning's Trainer, which takes `steps` steps."""
    strategy = zshard.lightning.ZShardStrategy(state_dict_type=kind)
    options |= {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options |= {"enable_checkpointing": False, "accelerator": "cpu", "max_steps": steps}
    return Trainer(strategy=strategy, devices=world(), **options)


def save_lightning(folder: Path) -> None:
    for kind in ("full", "sharded"):
        trainer, module = lightning_trainer(kind, fixed.STEPS), Lit()
        trainer.fit(module)
        module.load_state_dict(fixed.weights())
        trainer.save_checkpoint(folder / f"{kind}.ckpt")


class LookAtLightning(Callback):
    seen: tuple[int, ...] = ()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        fixed.check(pl_module, trainer.optimizers[0], Saved(lr=OF_LIGHTNING))
        self.seen += (trainer.global_step,)


def resume_lightning() -> None:
    look = LookAtLightning()
    for kind in ("full", "sharded"):
        trainer = lightning_trainer("full", fixed.STEPS + 1, callbacks=[look])
        trainer.fit(Lit(), ckpt_path=str(FOLDER / "lightning" / f"{kind}.ckpt"))
    assert look.seen == (fixed.STEPS,) * 2
