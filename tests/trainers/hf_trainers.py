"""Tiny models, data and Trainers of transformers, TRL and PEFT, for their tests."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerated import forget_accelerate
from compare import assert_same
from transformers import PrinterCallback

import zshard.transformers

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def tiny_llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **HEADS, **ENDS, **more}))


def sentences(count: int, seed: int = 0, length: int = 12) -> list[dict[str, list[int]]]:
    """Return token ids that a model can learn: each is the previous one plus a step."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        start, step = torch.randint(3, 60, (2,), generator=generator).tolist()
        ids = [3 + (start + step * i) % 60 for i in range(length)]
        found.append({"input_ids": ids, "labels": ids})
    return found


def arguments(folder: str | Path, kind: Any = None, **more: Any) -> Any:
    """TrainingArguments, or those of class `kind`, for a run of a few steps on CPUs."""
    from transformers import TrainingArguments

    chosen = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "max_grad_norm": 0.0,  # unless a test clips: DDP rounds the norm differently
    }
    return (kind or TrainingArguments)(**{**chosen, **more})


def new_run() -> None:
    """Start a run of a test."""
    forget_accelerate()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)


def trainer_of(kind: Any, strategy: str | None, args: Any, **parts: Any) -> Any:
    """Return a Trainer of class `kind`, unchanged if `strategy` is None. options: more arguments of
    FSDP()."""
    options = parts.pop("options", {})
    if strategy is not None:
        kind = zshard.transformers.shard(kind, strategy=strategy, **options)
    trainer = kind(args=args, **parts)
    trainer.remove_callback(PrinterCallback)
    return trainer


def outcome(trainer: Any) -> dict[str, Any]:
    """Return the losses and the full weights, by the plain model's names."""
    return {"losses": losses_of(trainer), "weights": weights_of(trainer)}


def same_as_ddp(make: Callable[[str | None], Any], strategy: str = "full_shard") -> Any:
    """Train make(None) and make(strategy); fail unless all is the same, and return both."""
    trainers, outcomes = [], []
    for each in (None, strategy):
        trainers.append(make(each))
        trainers[-1].train()
        outcomes.append(outcome(trainers[-1]))
    assert_same(outcomes[1], outcomes[0], strategy)
    return trainers


def check_resuming(make: Callable[..., Any], folder: Path, weights: bool = True) -> Any:
    """Fail unless a run that resumes in its middle ends as the whole one; return that."""
    whole = make(save_strategy="steps", save_steps=2)
    whole.train()
    torch.distributed.barrier()
    resumed = make()
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert losses_of(resumed) == losses_of(whole)
    if weights:  # else they are no numbers
        assert_same(weights_of(resumed), weights_of(whole), "the resumed run")
    return whole


def check_best(make: Callable[..., Any], **more: Any) -> None:
    """Fail unless make(strategy, ...) loads its best model at the end, the one of DDP."""
    steps = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}

    def best(strategy: str | None) -> Any:
        return make(strategy, **steps, load_best_model_at_end=True, **more)

    theirs, ours = same_as_ddp(best)
    assert ours.state.best_global_step == theirs.state.best_global_step
    for each in (theirs, ours):
        assert each.evaluate()["eval_loss"] == each.state.best_metric == ours.state.best_metric


def losses_of(trainer: Any) -> list[float]:
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the full weights of the trained model, on each rank, under the plain model's names."""
    state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    return {name: value.clone() for name, value in state.items()}


def tokenizer() -> Any:
    """A tokenizer of 64 words, `w3` to `w62` and four special ones."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, 63)), "<unk>"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def texts(count: int, seed: int = 0) -> Any:
    """Return a datasets.Dataset of `text`, of varying lengths."""
    from datasets import Dataset

    rows = [each["input_ids"][: 6 + i % 6] for i, each in enumerate(sentences(count, seed))]
    return Dataset.from_list([{"text": " ".join(f"w{i}" for i in ids)} for ids in rows])


def preferences(count: int, seed: int = 0) -> Any:
    """A datasets.Dataset of `prompt`, `chosen` and `rejected`."""
    from datasets import Dataset

    rows = []
    for each in sentences(count, seed):
        words = [f" w{i}" for i in each["input_ids"]]
        parts = {"prompt": words[:4], "chosen": words[4:8], "rejected": words[9:]}
        rows.append({name: "".join(part) for name, part in parts.items()})
    return Dataset.from_list(rows)
