"""BERT, from a config, learns which package of Python some words come from; transformers' Trainer
trains it.

    torchrun --standalone --nproc-per-node 2 examples/bert.py --strategy full_shard

With `--strategy ddp` the Trainer wraps DDP around the model, as it always does. Needs the extra
`trainers`.
"""

import argparse
import time
from typing import Any

import common
import packages
import torch
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


def samples(args: argparse.Namespace, held_out: bool) -> list[dict[str, Any]]:
    count = 256 if args.quick else 2048 if held_out else 20_000
    words, labels = packages.load(LENGTH, count, held_out)
    return [{"input_ids": w, "labels": n} for w, n in zip(words, labels, strict=True)]


class Report(TrainerCallback):
    """Hands losses, which are means over the ranks, and times of steps to the report."""

    def __init__(self, run: common.Run) -> None:
        self.run = run

    def on_step_begin(self, *_: Any, **more: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **more: Any) -> None:
        self.run.seconds.append(time.perf_counter() - self.began)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if logs and "loss" in logs:
            self.run.log(torch.tensor(logs["loss"]))


def train(run: common.Run) -> None:
    args = run.args
    kind: Any = Trainer
    if args.strategy != "ddp":
        kind = zshard.transformers.shard(Trainer, strategy=args.strategy)
    settings = TrainingArguments(
        str(args.save or "build/bert"),
        use_cpu=True,
        max_steps=args.steps,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=64,
        max_grad_norm=0.0,  # with clipping, the last bit of the norm may differ from DDP's
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
    trainer = kind(
        model=model,
        args=settings,
        train_dataset=samples(args, held_out=False),
        eval_dataset=samples(args, held_out=True),
        compute_metrics=lambda made: {"accuracy": accuracy(made.predictions, made.label_ids)},
        callbacks=[Report(run)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=common.newest(args.resume, "checkpoint-*"))
    reached = trainer.evaluate()["eval_accuracy"]
    chance = ("chance", 1 / len(packages.PACKAGES))
    run.result("held-out accuracy", reached, expected=EXPECTED, baseline=chance)


if __name__ == "__main__":
    common.main(__doc__, train, steps=150)
