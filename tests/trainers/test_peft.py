"""zshard under PEFT: adapters of a sharded model train, are saved in full, load and merge.

A small trainable part beside a large frozen one, in the same units. Each test runs the real
packages on two ranks and compares with DDP, or with PEFT in one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from spawn import RankPool, on_ranks, ranks

pytest.importorskip("peft", reason="needs zshard[trainers]: make test-trainers")
pytest.importorskip("accelerate", reason="needs zshard[trainers]: make test-trainers")

from accelerate import Accelerator
from accelerated import equal, names_in
from hf_trainers import arguments, losses_of, new_run, sentences, tiny_llama, weights_of
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
)
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer

import zshard.accelerate
import zshard.transformers
from zshard import FSDP

TARGETS = ["q_proj", "v_proj", "down_proj"]
CONFIGS: dict[str, Any] = {
    "lora": lambda: LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=TARGETS),
    "dora": lambda: LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=TARGETS, use_dora=True),
    "ia3": lambda: IA3Config(
        task_type="CAUSAL_LM", target_modules=TARGETS, feedforward_modules=["down_proj"]
    ),
    "prompt": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "p-tuning": lambda: PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16
    ),
    "prefix": lambda: PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "saved modules": lambda: LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=TARGETS, modules_to_save=["lm_head"]
    ),
}


def adapted(kind: str) -> Any:
    model = get_peft_model(tiny_llama(), CONFIGS[kind]())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # LoRA's B starts at zero, which is indistinguishable from no adapter
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    return model


def make(folder: str, kind: str, strategy: str | None, transport: str = "shm", **more: Any) -> Any:
    new_run()
    options = {"strategy": strategy, "transport": transport}
    trainer = Trainer if strategy is None else zshard.transformers.shard(Trainer, **options)
    made = trainer(
        model=adapted(kind),
        args=arguments(folder, **{"max_steps": 4, **more}),
        train_dataset=sentences(20),
        eval_dataset=sentences(4, seed=1),
    )
    made.remove_callback(PrinterCallback)
    return made


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("kind", CONFIGS)
@on_ranks(2)
def test_training_matches_ddp(kind, strategy, tmp_path):
    folder = str(tmp_path)
    found = []
    for each in (None, strategy):
        trainer = make(folder, kind, each)
        trainer.train()
        model = trainer.model
        counts = model.get_nb_trainable_parameters(), model.num_parameters(only_trainable=True)
        found.append(((losses_of(trainer), trainer.evaluate()["eval_loss"], counts), trainer))
    weights = [weights_of(trainer) for _, trainer in found]
    assert found[0][0] == found[1][0]
    assert equal(*weights)


def resume(kind: str, transport: str, folder: str) -> bool:
    """Adapters are saved in full, and resumed."""
    first = make(folder, kind, "full_shard", transport, save_strategy="steps", save_steps=2)
    first.train()
    first.save_model(f"{folder}/saved")
    torch.distributed.barrier()
    second = make(folder, kind, "full_shard", transport)
    second.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    adapter = get_peft_model_state_dict(first.model)
    plain = PeftModel.from_pretrained(tiny_llama(), f"{folder}/saved")
    assert equal(adapter, get_peft_model_state_dict(plain))
    if kind == "p-tuning":  # PEFT saves the prompts of its encoder, but not the encoder
        return True
    assert losses_of(first) == losses_of(second)
    return equal(weights_of(first), weights_of(second))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("kind", CONFIGS)
@ranks(2)
def test_adapters_are_saved_in_full_and_resumed(
    pool: RankPool, tmp_path: Path, kind: str, transport: str
) -> None:
    assert pool.run(resume, kind, transport, str(tmp_path)) == [True, True]
    files = names_in(tmp_path / "checkpoint-2")
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files


@on_ranks(2)
def test_best_adapter_is_loaded_at_the_end(tmp_path):
    folder = str(tmp_path)
    found = []
    for strategy in (None, "full_shard"):
        where = f"{folder}/{strategy}"
        steps = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
        steps |= {"save_steps": 1, "learning_rate": 0.5, "load_best_model_at_end": True}
        trainer = make(where, "lora", strategy, **steps)
        trainer.train()
        score = trainer.state.best_metric
        found.append((score, trainer.state.best_global_step, weights_of(trainer)))
        assert trainer.evaluate()["eval_loss"] == score
    assert found[0][:2] == found[1][:2] and equal(found[0][2], found[1][2])


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
@on_ranks(2)
def test_adapters_merge_into_a_plain_model(kind, tmp_path):
    plain = adapted(kind).merge_and_unload()
    model = FSDP(adapted(kind))
    whole = model.merge_and_unload()
    assert type(whole) is type(plain) and not isinstance(whole, FSDP)
    ids = torch.tensor([[3, 5, 7, 9]])
    assert torch.equal(whole(ids).logits, plain(ids).logits)
    bare = model.unload()
    assert equal(dict(bare.state_dict()), dict(adapted(kind).unload().state_dict()))
    assert equal(dict(whole.state_dict()), dict(plain.state_dict()))


def states() -> int:
    """Return the elements of Adam's state on this rank, for adapters of some pages."""
    config = LoraConfig(task_type="CAUSAL_LM", r=64, target_modules=TARGETS)
    model = FSDP(get_peft_model(tiny_llama(), config))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ids = torch.tensor([[3, 5, 7, 9]])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return sum(zshard.to_local(each["exp_avg"]).numel() for each in optimizer.state.values())


@ranks(2)
def test_ranks_share_the_state_of_an_adapter(pool: RankPool) -> None:
    """In pages: each unit's shards start at page boundaries, so a smaller one is on one rank."""
    first, second = pool.run(states)
    assert max(first, second) < 0.6 * (first + second)


@pytest.mark.parametrize("step", ["first", "second"])
@on_ranks(2)
def test_adapter_must_be_added_before_sharding(step):
    """An adapter that is added after FSDP(...)."""
    model = tiny_llama()
    ids = torch.tensor([[3, 5, 7, 9]])
    with pytest.raises(ValueError) as caught:
        if step == "first":
            model = get_peft_model(FSDP(model), CONFIGS["lora"]())
        else:
            model = FSDP(adapted("lora"))
            model.add_adapter("second", CONFIGS["lora"]())
            model.set_adapter("second")
        model(input_ids=ids, labels=ids).loss.backward()
    text = str(caught.value)
    assert "after FSDP(...)" in text and "add it before FSDP(...)" in text


def saved_by_zshard(how: str, folder: str) -> bool:
    """A full PEFT model in a zshard folder: from_pretrained() of it would draw all weights."""
    model = adapted("lora") if how != "injected" else tiny_llama()
    if how == "injected":
        inject_adapter_in_model(CONFIGS["lora"](), model)
    if how == "accelerate":
        new_run()
        accelerator = Accelerator(cpu=True)
        zshard.accelerate.shard(accelerator)
        sharded = accelerator.prepare(model)
        accelerator.save_state(folder)
        path = f"{folder}/zshard_model"
    else:
        sharded, path = FSDP(model), folder
        zshard.save(folder, sharded)
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(path)
    fresh = adapted("lora") if how != "injected" else tiny_llama()
    if how == "injected":
        inject_adapter_in_model(CONFIGS["lora"](), fresh)
    with torch.no_grad():
        for param in fresh.parameters():
            param.zero_()
    zshard.load(path, fresh)
    return equal(dict(fresh.state_dict()), dict(sharded.state_dict()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["save", "injected", "accelerate"])
@ranks(2)
def test_folder_of_adapters_has_no_config_json(pool: RankPool, tmp_path: Path, how: str) -> None:
    assert pool.run(saved_by_zshard, how, str(tmp_path / "x")) == [True, True]
    assert "config.json" not in {path.name for path in (tmp_path / "x").rglob("*")}
