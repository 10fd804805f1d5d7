"""zshard under TRL's trainers: fine-tuning and preferences, as with their own DDP.

TRL's trainers are Trainers that replace a model's forward by one that uses the weights of `lm_head`
without calling it: the choice of units must allow for that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from spawn import RankPool, on_ranks, ranks

pytest.importorskip("trl", reason="needs zshard[trainers]: make test-trainers")

from accelerated import equal, names_in
from hf_trainers import (
    arguments,
    losses_of,
    new_run,
    preferences,
    texts,
    tiny_llama,
    tokenizer,
    weights_of,
)
from transformers import PrinterCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import zshard.transformers
from zshard import FSDP


def make(kind: str, folder: str, strategy: str | None, model: Any = None, **more: Any) -> Any:
    """Return an SFTTrainer or DPOTrainer, unchanged if `strategy` is None."""
    new_run()
    trainer, config = {"sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig)}[kind]
    if strategy is not None:
        trainer = zshard.transformers.shard(trainer, strategy=strategy)
    options: dict[str, Any] = {"max_length": 16, "bf16": False, "gradient_checkpointing": False}
    if kind == "dpo":
        more = {"ref_model": tiny_llama(), **more}
    given = {name: more.pop(name) for name in ("ref_model", "peft_config") if name in more}
    made = trainer(
        model=model or tiny_llama(),
        args=arguments(folder, config, **{"max_steps": 4, **options, **more}),
        train_dataset=texts(20) if kind == "sft" else preferences(20),
        processing_class=tokenizer(),
        **given,
    )
    made.remove_callback(PrinterCallback)
    return made


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 3},
    "bf16": {"bf16": True},
    "recomputed": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trainer", ["sft", "dpo"])
@on_ranks(2)
def test_training_matches_ddp(trainer, kind, strategy, tmp_path):
    folder = str(tmp_path)
    found = []
    for each in (None, strategy):
        made = make(trainer, folder, each, **KINDS[kind])
        made.train()
        found.append((losses_of(made), weights_of(made)))
    apart = [abs(a - b) for a, b in zip(found[0][0], found[1][0], strict=True)]
    same = equal(found[0][1], found[1][1])
    assert apart == [0.0] * 4 and same


@on_ranks(2)
def test_reference_model_is_sharded_and_synchronized(tmp_path):
    """The reference model is sharded, and follows the model when it is synchronized."""
    folder = str(tmp_path)
    found = []
    for strategy in (None, "full_shard"):
        sync = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
        made = make("dpo", folder, strategy, **sync)
        made.train()
        reference = made.accelerator.unwrap_model(made.ref_model)
        found.append({name: value.clone() for name, value in reference.state_dict().items()})
    assert isinstance(reference, FSDP)
    assert equal(*found)


def resume(trainer: str, folder: str) -> bool:
    save = {"save_strategy": "steps", "save_steps": 2}
    first = make(trainer, folder, "full_shard", **save)
    first.train()
    torch.distributed.barrier()
    second = make(trainer, folder, "full_shard")
    second.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return losses_of(first) == losses_of(second) and equal(weights_of(first), weights_of(second))


@pytest.mark.parametrize("trainer", ["sft", "dpo"])
@ranks(2)
def test_resumed_run_has_the_same_losses(pool: RankPool, tmp_path: Path, trainer: str) -> None:
    assert pool.run(resume, trainer, str(tmp_path)) == [True, True]
    assert "checkpoint-2/model.safetensors" in names_in(tmp_path)


def adapted(trainer: str, folder: str) -> bool:
    """With a LoRA config of PEFT; DPO's reference is then the model without the adapter."""
    from peft import LoraConfig

    found = []
    for strategy in (None, "full_shard"):
        config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
        more = {"ref_model": None} if trainer == "dpo" else {}
        made = make(trainer, folder, strategy, peft_config=config, **more)
        made.train()
        found.append((losses_of(made), weights_of(made)))
    return found[0][0] == found[1][0] and equal(found[0][1], found[1][1])


@pytest.mark.parametrize("trainer", ["sft", "dpo"])
@ranks(2)
def test_adapter_trains_as_under_ddp(pool: RankPool, tmp_path: Path, trainer: str) -> None:
    pytest.importorskip("peft", reason="needs zshard[trainers]: make test-trainers")
    assert pool.run(adapted, trainer, str(tmp_path)) == [True, True]
