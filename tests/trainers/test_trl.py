"""zshard under TRL's trainers: fine-tuning and preferences, as with their own DDP.

TRL's trainers are Trainers that replace a model's forward by one that uses the weights of `lm_head`
without calling it: the choice of units must allow for that.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from compare import assert_same
from spawn import on_ranks

pytest.importorskip("trl", reason="needs zshard[trainers]: make test-trainers")

from accelerated import names_in
from hf_trainers import (
    arguments,
    check_resuming,
    new_run,
    preferences,
    same_as_ddp,
    texts,
    tiny_llama,
    tokenizer,
    trainer_of,
)
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from zshard import FSDP

TRAINERS = pytest.mark.parametrize("trainer", ["sft", "dpo"])


def make(trainer: str, folder: Path, strategy: str | None, **more: Any) -> Any:
    """Return an SFTTrainer or DPOTrainer, unchanged if `strategy` is None."""
    new_run()
    kind, config = {"sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig)}[trainer]
    if trainer == "dpo":
        more = {"ref_model": tiny_llama(), **more}
    parts = {name: more.pop(name) for name in ("ref_model", "peft_config") if name in more}
    options = {"max_length": 16, "bf16": False, "gradient_checkpointing": False, "max_steps": 4}
    args = arguments(folder, config, **{**options, **more})
    data = texts(20) if trainer == "sft" else preferences(20)
    parts |= {"model": tiny_llama(), "train_dataset": data, "processing_class": tokenizer()}
    return trainer_of(kind, strategy, args, **parts)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 3},
    "bf16": {"bf16": True},
    "recomputed": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("kind", KINDS)
@TRAINERS
@on_ranks(2)
def test_training_matches_ddp(trainer, kind, strategy, tmp_path):
    same_as_ddp(functools.partial(make, trainer, tmp_path, **KINDS[kind]), strategy)


@on_ranks(2)
def test_reference_model_is_sharded_and_synchronized(tmp_path):
    """The reference model is sharded, and follows the model when it is synchronized."""
    sync = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
    theirs, ours = (
        trainer.accelerator.unwrap_model(trainer.ref_model)
        for trainer in same_as_ddp(functools.partial(make, "dpo", tmp_path, **sync))
    )
    assert isinstance(ours, FSDP)
    assert_same(ours.state_dict(), theirs.state_dict(), "the reference model")


@TRAINERS
@on_ranks(2)
def test_resumed_run_has_the_same_losses(tmp_path, trainer):
    check_resuming(functools.partial(make, trainer, tmp_path, "full_shard"), tmp_path)
    assert "checkpoint-2/model.safetensors" in names_in(tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
@TRAINERS
@on_ranks(2)
def test_adapter_trains_as_under_ddp(tmp_path, trainer):
    """With a LoRA config of PEFT; DPO's reference is then the model without the adapter."""
    from peft import LoraConfig

    def adapted(strategy: str | None) -> Any:
        targets = ["q_proj", "v_proj"]
        config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets)
        more = {"ref_model": None} if trainer == "dpo" else {}
        return make(trainer, tmp_path, strategy, peft_config=config, **more)

    same_as_ddp(adapted)
