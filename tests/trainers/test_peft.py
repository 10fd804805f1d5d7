"""zshard under PEFT: adapters of a sharded model train, are saved in full, load and merge.

A small trainable part and a large frozen one are in the same units. Each test runs the real
packages on two ranks and compares with DDP, or with PEFT in one process.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from compare import assert_same
from spawn import on_ranks

pytest.importorskip("peft", reason="needs zshard[trainers]: make test-trainers")
pytest.importorskip("accelerate", reason="needs zshard[trainers]: make test-trainers")

from accelerate import Accelerator
from accelerated import names_in
from hf_trainers import (
    arguments,
    check_best,
    check_resuming,
    new_run,
    same_as_ddp,
    sentences,
    tiny_llama,
    trainer_of,
)
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
from transformers import AutoModelForCausalLM, Trainer

import zshard.accelerate
import zshard.transformers
from zshard import FSDP

TARGETS = ["q_proj", "v_proj", "down_proj"]
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lora": (LoraConfig, {"r": 4, "target_modules": TARGETS}),
    "dora": (LoraConfig, {"r": 4, "target_modules": TARGETS, "use_dora": True}),
    "ia3": (IA3Config, {"target_modules": TARGETS, "feedforward_modules": ["down_proj"]}),
    "prompt": (PromptTuningConfig, {"num_virtual_tokens": 4}),
    "p-tuning": (PromptEncoderConfig, {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
    "prefix": (PrefixTuningConfig, {"num_virtual_tokens": 4}),
    "saved modules": (
        LoraConfig,
        {"r": 4, "target_modules": TARGETS, "modules_to_save": ["lm_head"]},
    ),
}
IDS = torch.tensor([[3, 5, 7, 9]])


def config_of(kind: str) -> Any:
    config, options = CONFIGS[kind]
    return config(task_type="CAUSAL_LM", **options)


def adapted(kind: str) -> Any:
    model = get_peft_model(tiny_llama(), config_of(kind))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # LoRA's B starts at zero, which is indistinguishable from no adapter
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    return model


def make(folder: str, kind: str, strategy: str | None, transport: str = "shm", **more: Any) -> Any:
    new_run()
    args = arguments(folder, **{"max_steps": 4, **more})
    data = {"train_dataset": sentences(20), "eval_dataset": sentences(4, seed=1)}
    options = {"transport": transport}
    return trainer_of(Trainer, strategy, args, model=adapted(kind), options=options, **data)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("kind", CONFIGS)
@on_ranks(2)
def test_training_matches_ddp(kind, strategy, tmp_path):
    theirs, ours = same_as_ddp(functools.partial(make, tmp_path, kind), strategy)
    assert ours.evaluate()["eval_loss"] == theirs.evaluate()["eval_loss"]
    assert ours.model.get_nb_trainable_parameters() == theirs.model.get_nb_trainable_parameters()
    counts = [each.model.num_parameters(only_trainable=True) for each in (ours, theirs)]
    assert counts[0] == counts[1]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("kind", CONFIGS)
@on_ranks(2)
def test_adapters_are_saved_in_full_and_resumed(tmp_path, kind, transport):
    build = functools.partial(make, tmp_path, kind, "full_shard", transport)
    if kind == "p-tuning":  # PEFT saves the prompts of its encoder, but not the encoder
        trainer = build(save_strategy="steps", save_steps=2)
        trainer.train()
    else:
        trainer = check_resuming(build, tmp_path)
    trainer.save_model(f"{tmp_path}/saved")
    torch.distributed.barrier()
    loaded = PeftModel.from_pretrained(tiny_llama(), f"{tmp_path}/saved")
    adapter = get_peft_model_state_dict(trainer.model)
    assert_same(get_peft_model_state_dict(loaded), adapter, "the adapter that is loaded")
    files = names_in(tmp_path / "checkpoint-2")
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files


@on_ranks(2)
def test_best_adapter_is_loaded_at_the_end(tmp_path):
    def lora(strategy: str | None, **more: Any) -> Any:
        return make(f"{tmp_path}/{strategy}", "lora", strategy, **more)

    check_best(lora, learning_rate=0.5)


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
@on_ranks(2)
def test_adapters_merge_into_a_plain_model(kind):
    plain = adapted(kind).merge_and_unload()
    model = FSDP(adapted(kind))
    whole = model.merge_and_unload()
    assert type(whole) is type(plain) and not isinstance(whole, FSDP)
    assert torch.equal(whole(IDS).logits, plain(IDS).logits)
    bare, theirs = model.unload(), adapted(kind).unload()
    assert_same(dict(bare.state_dict()), dict(theirs.state_dict()), "the model without the adapter")
    assert_same(dict(whole.state_dict()), dict(plain.state_dict()), "the merged model")


@on_ranks(2)
def test_ranks_share_the_state_of_an_adapter():
    """In pages: each unit's shards start at page boundaries, so a smaller one is on one rank."""
    config = LoraConfig(task_type="CAUSAL_LM", r=64, target_modules=TARGETS)
    model = FSDP(get_peft_model(tiny_llama(), config))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    states = [zshard.to_local(each["exp_avg"]).numel() for each in optimizer.state.values()]
    total = torch.tensor(sum(states))
    torch.distributed.all_reduce(total)
    assert sum(states) < 0.6 * total


def added_to_sharded() -> Any:
    return get_peft_model(FSDP(tiny_llama()), config_of("lora"))


def second_added_to_sharded() -> Any:
    model = FSDP(adapted("lora"))
    model.add_adapter("second", config_of("lora"))
    model.set_adapter("second")
    return model


@pytest.mark.parametrize("build", [added_to_sharded, second_added_to_sharded])
@on_ranks(2)
def test_adapter_must_be_added_before_sharding(build):
    with pytest.raises(ValueError, match=r"after FSDP\(...\).*add it before FSDP\(...\)"):
        build()(input_ids=IDS, labels=IDS).loss.backward()


def unsaved(how: str) -> Any:
    if how != "injected":
        return adapted("lora")
    model = tiny_llama()
    inject_adapter_in_model(config_of("lora"), model)
    return model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["save", "injected", "accelerate"])
@on_ranks(2)
def test_folder_of_adapters_has_no_config_json(tmp_path, how):
    """A full PEFT model in a zshard folder: from_pretrained() of it would draw all weights."""
    model, folder = unsaved(how), tmp_path / "x"
    if how == "accelerate":
        new_run()
        accelerator = zshard.accelerate.shard(Accelerator(cpu=True))
        sharded = accelerator.prepare(model)
        accelerator.save_state(str(folder))
        path = folder / "zshard_model"
    else:
        sharded, path = FSDP(model), folder
        zshard.save(folder, sharded)
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(path)
    fresh = unsaved(how)
    with torch.no_grad():
        for param in fresh.parameters():
            param.zero_()
    zshard.load(path, fresh)
    assert_same(dict(fresh.state_dict()), dict(sharded.state_dict()), "the model that is loaded")
    assert "config.json" not in {each.name for each in folder.rglob("*")}
