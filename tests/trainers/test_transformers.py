"""zshard under the Trainer of transformers: the same training as with its own DDP.

Each test runs the real Trainer on two ranks, once unchanged and once as
`zshard.transformers.shard(Trainer)`, and compares.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from nursery import fork_ranks
from rows import all_rows
from scenarios import message_of, over
from spawn import RankPool, on_ranks, ranks

pytest.importorskip("accelerate", reason="needs zshard[trainers]: make test-trainers")
pytest.importorskip("transformers", reason="needs zshard[trainers]: make test-trainers")

from accelerated import names_in
from hf_trainers import (
    arguments,
    check_best,
    losses_of,
    new_run,
    outcome,
    same_as_ddp,
    sentences,
    tiny_llama,
    trainer_of,
    weights_of,
)
from micro_batches import LOW, MICRO, STRATEGY, check_sums, full_grads
from transformers import Trainer, TrainerCallback
from transformers import trainer as trainer_module

import zshard
import zshard.transformers
from zshard import FSDP

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "c10d"])


def make(folder: Any, strategy: str | None, model: Any = None, rows: int = 22, **more: Any) -> Any:
    """Return a Trainer, unchanged if `strategy` is None. options: more arguments of FSDP()."""
    new_run()
    parts = {
        name: more.pop(name) for name in ("options", "model_init", "optimizers") if name in more
    }
    if "model_init" not in parts:
        parts["model"] = model or tiny_llama()
    data = {"train_dataset": sentences(rows), "eval_dataset": sentences(5, seed=1)}
    return trainer_of(Trainer, strategy, arguments(folder, **more), **parts, **data)


# --- training -------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 4},  # an epoch has 6 batches
    "bf16": {"bf16": True},
    "clipped": {"max_grad_norm": 0.1},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 3},
    "recomputed": {"gradient_checkpointing": True},
    "smoothed": {"label_smoothing_factor": 0.1},  # it checks the model's class by name
}


@pytest.mark.parametrize("strategy", ["full_shard", "zero2", "no_shard"])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_training_matches_ddp(kind, strategy, tmp_path):
    runs = []
    for each in (None, strategy):
        torch._dynamo.reset()  # after other sizes, compiled code has other kernels
        trainer = make(tmp_path, each, **KINDS[kind])
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        counts = trainer.model.num_parameters(), trainer.get_num_trainable_parameters()
        logged = trainer_module.get_model_param_count(trainer.model_wrapped, trainable_only=True)
        sizes = [*counts, trainer.state.total_flos, logged]
        runs.append({**outcome(trainer), "evaluation": loss, "sizes": sizes})
    theirs, ours = runs
    assert theirs["sizes"] == ours["sizes"], "whole parameters are counted"
    assert len(theirs["losses"]) == KINDS[kind].get("max_steps", 6)
    if kind == "clipped":
        torch.testing.assert_close(ours["weights"], theirs["weights"], rtol=0, atol=1e-5)
    else:
        assert_same(ours, theirs, "the run")


class Grads(TrainerCallback):
    """Keeps the gradients of each optimizer step."""

    def __init__(self) -> None:
        self.grads: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.grads += full_grads(more["model"])


@on_ranks(2)
def test_micro_batches_are_summed_in_float32(tmp_path):
    more = {"gradient_accumulation_steps": MICRO, "per_device_train_batch_size": 1, "max_steps": 1}

    def accumulated() -> list[torch.Tensor]:
        trainer = make(tmp_path, STRATEGY, options={"mixed_precision": LOW}, rows=2 * MICRO, **more)
        grads = Grads()
        trainer.add_callback(grads)
        trainer.train()
        return grads.grads

    check_sums(accumulated)


@on_ranks(2)
def test_tied_embeddings_and_frozen_layers(tmp_path):
    same_as_ddp(lambda strategy: make(tmp_path, strategy, tiny_llama(tie_word_embeddings=True)))

    def frozen(strategy: str | None) -> Any:
        model = tiny_llama()
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=3)
        return make(tmp_path, strategy, model, optimizers=(optimizer, schedule))

    same_as_ddp(frozen)


@on_ranks(2)
def test_smaller_last_batches_and_a_model_init(tmp_path):
    """An epoch whose last window and last batch are smaller, of a model that the Trainer creates."""
    more = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 2, "rows": 11}
    theirs, ours = same_as_ddp(
        lambda strategy: make(tmp_path, strategy, model_init=lambda: tiny_llama(), **more)
    )
    assert theirs.evaluate()["eval_loss"] == ours.evaluate()["eval_loss"]


@on_ranks(2)
def test_rank_0_may_save_alone_on_one_host(tmp_path):
    """Rank 0 saves and generates alone; then all continue training from a checkpoint."""
    save = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = make(tmp_path, "full_shard", options={"transport": "shm"}, **save)
    trainer.train()
    if trainer.is_world_process_zero():
        trainer.save_model(f"{tmp_path}/alone")
        trainer.model.generate(torch.tensor([[3, 4]]), max_new_tokens=4)
    before = losses_of(trainer)
    trainer.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-1")
    assert losses_of(trainer) == before


# --- checkpoints ----------------------------------------------------------------------------------


def saving(folder: Any, strategy: str | None, **more: Any) -> Any:
    """Return a Trainer that saves after its second of three steps with more than one batch each."""
    save = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    return make(folder, strategy, **{"max_steps": 3, **save, **more})


def save(folder: Path, strategy: str | None, transport: str = "shm") -> dict[str, Any]:
    with over(transport):
        trainer = saving(folder, strategy)
        trainer.train()
        return outcome(trainer)


def resume(folder: Path, strategy: str | None, transport: str = "shm") -> dict[str, Any]:
    with over(transport):
        trainer = saving(folder, strategy, save_strategy="no")
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        return outcome(trainer)


FILES = {"config.json", "generation_config.json", "model.safetensors", "optimizer.pt"}
FILES |= {"rng_state_0.pth", "rng_state_1.pth", "scheduler.pt", "trainer_state.json"}
FILES |= {"training_args.bin"}


@TRANSPORTS
@pytest.mark.parametrize("saved", ["full_shard", None], ids=["sharded", "ddp"])
@pytest.mark.parametrize("loaded", ["full_shard", None], ids=["sharded", "ddp"])
@on_ranks(2)
def test_resumed_run_has_the_same_losses(tmp_path, saved, loaded, transport):
    """Each loads the other's checkpoints."""
    before = save(tmp_path, saved, transport)
    torch.distributed.barrier()
    assert names_in(tmp_path / "checkpoint-2") == FILES
    assert_same(resume(tmp_path, loaded, transport), before, "the resumed run")


@ranks(1, 3)
def test_another_number_of_ranks_resumes(pool: RankPool, pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(save, tmp_path, "full_shard")
    ours, theirs = (pool.run(resume, tmp_path, strategy) for strategy in ("full_shard", None))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["losses"] == other["losses"] or pool.world > 2  # summed in another order
        torch.testing.assert_close(mine["weights"], other["weights"])


class Killer(TrainerCallback):
    """Kills a rank in the middle of its third step."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(folder: Path) -> None:
    trainer = saving(folder, "full_shard")
    trainer.add_callback(Killer())
    trainer.train()


def test_killed_run_is_resumed(pool2: RankPool, tmp_path: Path) -> None:
    results = fork_ranks(killed, 2, tmp_path, timeout=120)
    assert results[1].returncode == -signal.SIGKILL
    assert results[0].returncode == 1 and "PeerError: rank 1" in results[0].stderr
    resumed = pool2.run(resume, tmp_path, "full_shard")[0]
    assert_same(resumed, pool2.run(save, tmp_path / "again", "full_shard")[0], "the resumed run")


@on_ranks(2)
def test_best_model_is_loaded_at_the_end(tmp_path):
    def make(strategy: str | None, **more: Any) -> Any:
        return saving(tmp_path / str(strategy), strategy, **more)

    check_best(make, learning_rate=0.2)


@TRANSPORTS
@on_ranks(2)
def test_save_model_is_for_from_pretrained(tmp_path, transport):
    """After training, and before."""
    with over(transport):
        trainer = make(tmp_path, "full_shard", tiny_llama(tie_word_embeddings=True), max_steps=1)
        trainer.save_model(f"{tmp_path}/before")
        trainer.train()
    trainer.save_model(f"{tmp_path}/after")
    torch.distributed.barrier()
    again = type(tiny_llama()).from_pretrained(f"{tmp_path}/after")
    assert again.config.architectures == ["LlamaForCausalLM"]
    assert_same(dict(again.state_dict()), weights_of(trainer), "the model that is loaded")


# --- evaluation and generation --------------------------------------------------------------------


@on_ranks(2)
def test_evaluation_shards_the_model(tmp_path):
    """An evaluation before training also shards the model; losses are the same as without it."""
    first, plain = (make(tmp_path, each, max_steps=3) for each in ("full_shard", None))
    assert first.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    assert isinstance(first.model, FSDP)
    for trainer in (first, other := make(tmp_path, None, max_steps=3)):
        trainer.train()
    assert losses_of(first) == losses_of(other)


@TRANSPORTS
@on_ranks(2)
def test_predict_with_generate(tmp_path, transport):
    """Prompts on each rank end after different numbers of tokens."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config
    from transformers import T5ForConditionalGeneration as T5

    generates = {"predict_with_generate": True, "generation_max_length": 20, "max_steps": 2}
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}

    def t5(strategy: str | None) -> Any:
        new_run()
        model = T5(T5Config(**sizes, vocab_size=64, decoder_start_token_id=0))
        args = arguments(tmp_path, Seq2SeqTrainingArguments, **generates)
        data = {"train_dataset": sentences(8), "eval_dataset": sentences(6, 1)}
        return trainer_of(Seq2SeqTrainer, strategy, args, model=model, **data)

    with over(transport):
        trainers = same_as_ddp(t5)
        length = 8 + 4 * torch.distributed.get_rank()
        theirs, ours = (each.predict(sentences(6, seed=2), max_length=length) for each in trainers)
    assert ours.predictions.tolist() == theirs.predictions.tolist()
    assert ours.metrics["test_loss"] == theirs.metrics["test_loss"]


# --- misuse ---------------------------------------------------------------------------------------


def watching(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_WATCH", "all")
        make(folder, "full_shard", report_to=["wandb"])


@on_ranks(2)
def test_misuse_names_the_remedy(tmp_path):
    shard, folder = zshard.transformers.shard, tmp_path
    misuses = {
        "WANDB_WATCH=all logs full tensors of one rank": lambda: watching(folder),
        "DistributedDataParallel cannot wrap a model that zshard has": (
            lambda: make(folder, None, FSDP(tiny_llama())).train()
        ),
        "shard() expects a class, got an object": lambda: shard(make(folder, None)),
        "shard() expects a subclass of transformers.Trainer": lambda: shard(dict),
        "Trainer already shards its models": lambda: shard(shard(Trainer)),
        "shard() takes the arguments of FSDP()": lambda: shard(Trainer, stratgy="zero2"),
        "got a shard of": lambda: make(folder, "full_shard", optim="adafactor").train(),
        "bf16_full_eval=True would convert": (
            lambda: make(folder, "full_shard", bf16_full_eval=True).evaluate()
        ),
        "configured for torch's FSDP": lambda: make(folder, "full_shard", fsdp=True),
    }
    with all_rows() as row:
        for text, misuse in misuses.items():
            with row(text):
                assert text in message_of(misuse, (TypeError, ValueError, RuntimeError))
    os.environ.pop("ACCELERATE_USE_FSDP", None)


def test_importing_zshard_imports_no_trainer() -> None:
    code = "import sys, zshard, zshard.accelerate, zshard.transformers; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"accelerate", "transformers", "peft", "trl"} & set(done.stdout.split())
