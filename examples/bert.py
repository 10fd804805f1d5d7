"""BERT, from a config, learns which package of Python some words come from; transformers' Trainer
trains it.

    torchrun --standalone --nproc-per-node 2 examples/bert.py --strategy full_shard

With `--strategy ddp` the Trainer wraps DDP around the model, as it always does. Needs the extra
`trainers`.
"""

import time
from pathlib import Path
from typing import Any

import common
import packages
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import zshard.transformers

EXPECTED = 0.4  # of held-out samples that are recognised; chance: 1 in 8
LENGTH = 32  # words of a sample
BATCH = 32  # per rank
LR = 1e-3


def bert(quick: bool) -> BertForSequenceClassification:
    torch.manual_seed(0)  # the same initial parameters on all ranks
    config = BertConfig(
        vocab_size=packages.VOCABULARY,
        hidden_size=32 if quick else 128,
        num_hidden_layers=2 if quick else 3,
        num_attention_heads=4,
        intermediate_size=128 if quick else 512,
        max_position_embeddings=LENGTH,
        num_labels=len(packages.PACKAGES),
    )
    return BertForSequenceClassification(config)


def accuracy(logits: Any, labels: Any) -> float:
    right = torch.as_tensor(logits).argmax(-1) == torch.as_tensor(labels)
    return right.float().mean().item()


def data(quick: bool, held_out: bool) -> tuple[Tensor, Tensor]:
    """The words, (N, LENGTH), and labels of one side."""
    return packages.load(LENGTH, 256 if quick else 2048 if held_out else 20_000, held_out)


def samples(quick: bool, held_out: bool) -> list[dict[str, Tensor]]:
    pairs = zip(*data(quick, held_out), strict=True)
    return [{"input_ids": words, "labels": label} for words, label in pairs]


def sharded(run: common.Run, trainer: Any) -> Any:
    """The class of a Trainer, as `--strategy` says."""
    if run.args.strategy == "ddp":
        return trainer
    return zshard.transformers.shard(trainer, strategy=run.args.strategy)


def resume(run: common.Run, trainer: Any, folder: Path | None) -> None:
    """Train, from the newest checkpoint in the folder if there is one. The last one does not count,
    as a Trainer that resumes from it trains a step beyond `max_steps`."""
    saved = common.newest(folder, "checkpoint-*", but=f"checkpoint-{run.args.steps}")
    trainer.train(resume_from_checkpoint=saved)


class Report(TrainerCallback):
    """Hands losses, which are means over the ranks, and times of steps to the report."""

    def __init__(self, run: common.Run) -> None:
        self.run = run

    def on_train_begin(self, args: Any, state: Any, *_: Any, **more: Any) -> None:
        self.run.first = state.global_step

    def on_step_begin(self, *_: Any, **more: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.run.seconds.append(time.perf_counter() - self.began)
        control.should_training_stop |= state.global_step >= self.run.args.stop_after

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if logs and "loss" in logs:
            self.run.log(torch.tensor(logs["loss"]))


def train(run: common.Run) -> None:
    args = run.args
    settings = TrainingArguments(
        str(args.save or "build/bert"),
        use_cpu=True,
        max_steps=args.steps,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=64,
        max_grad_norm=0.0,  # DDP rounds the norm for clipping differently
        learning_rate=LR,
        lr_scheduler_type="cosine",
        warmup_steps=args.steps // 10,
        logging_steps=1,
        save_strategy="steps" if args.save else "no",
        save_steps=args.save_every,
        report_to="none",
        disable_tqdm=True,
        seed=args.seed,
    )
    model = bert(args.quick)
    run.note(model)
    trainer = sharded(run, Trainer)(
        model=model,
        args=settings,
        train_dataset=samples(args.quick, held_out=False),
        eval_dataset=samples(args.quick, held_out=True),
        compute_metrics=lambda made: {"accuracy": accuracy(made.predictions, made.label_ids)},
        callbacks=[Report(run)],
    )
    trainer.remove_callback(PrinterCallback)
    resume(run, trainer, args.resume)
    reached = trainer.evaluate()["eval_accuracy"]
    chance = ("chance", 1 / len(packages.PACKAGES))
    run.result("held-out accuracy", reached, expected=EXPECTED, baseline=chance)


if __name__ == "__main__":
    common.main(__doc__, train, steps=150)
