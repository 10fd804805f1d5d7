"""Tiny models, data and Trainers of transformers, TRL and PEFT, for their tests."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from accelerated import forget_accelerate

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
