"""zshard under the Trainer of transformers: the same training as with its own DDP.

Each test runs the real Trainer on two ranks, once unchanged and once as
`zshard.transformers.shard(Trainer)`, and compares.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from nursery import fork_ranks
from spawn import RankPool, on_ranks, ranks

pytest.importorskip("accelerate", reason="needs zshard[trainers]: make test-trainers")
pytest.importorskip("transformers", reason="needs zshard[trainers]: make test-trainers")

from accelerated import equal, names_in
from hf_trainers import arguments, losses_of, new_run, sentences, tiny_llama, weights_of
from micro_batches import LOW, MICRO, STRATEGY, check_sums, full_grads
from transformers import PrinterCallback, Trainer, TrainerCallback
from transformers import trainer as trainer_module

import zshard
import zshard.transformers
from zshard import FSDP


def make(
    folder: str,
    strategy: str | None,
    model: Any = None,
    options: dict[str, Any] | None = None,
    rows: int = 22,
    **more: Any,
) -> Any:
    """Return a Trainer, unchanged if `strategy` is None. options: more arguments of FSDP()."""
    new_run()
    kind = Trainer
    if strategy is not None:
        kind = zshard.transformers.shard(Trainer, strategy=strategy, **(options or {}))
    trainer = kind(
        model=model or tiny_llama(),
        args=arguments(folder, **more),
        train_dataset=sentences(rows),
        eval_dataset=sentences(5, seed=1),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


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
    folder = str(tmp_path)
    found = []
    for each in (None, strategy):
        torch._dynamo.reset()  # after other sizes, compiled code has other kernels
        trainer = make(folder, each, **KINDS[kind])
        trainer.train()
        metrics = trainer.evaluate()
        logged = trainer_module.get_model_param_count(trainer.model_wrapped, trainable_only=True)
        counted = trainer.model.num_parameters(), trainer.get_num_trainable_parameters()
        sizes = *counted, trainer.state.total_flos, logged
        found.append((losses_of(trainer), metrics["eval_loss"], sizes, weights_of(trainer)))
    theirs, ours = found
    assert theirs[2] == ours[2], "whole parameters are counted"
    assert theirs[3].keys() == ours[3].keys()
    apart = max(float((theirs[3][name] - ours[3][name]).abs().max()) for name in theirs[3])
    same = theirs[:2] == ours[:2]
    steps = len(theirs[0])
    assert steps == KINDS[kind].get("max_steps", 6)
    if kind == "clipped":
        assert apart < 1e-5
    else:
        assert same and apart == 0


class Grads(TrainerCallback):
    """Keeps the gradients of each optimizer step."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.found += full_grads(more["model"])


def accumulated(folder: str) -> list[torch.Tensor]:
    more = {"gradient_accumulation_steps": MICRO, "per_device_train_batch_size": 1, "max_steps": 1}
    trainer = make(folder, STRATEGY, options={"mixed_precision": LOW}, rows=2 * MICRO, **more)
    grads = Grads()
    trainer.add_callback(grads)
    trainer.train()
    return grads.found


@ranks(2)
def test_micro_batches_are_summed_in_float32(pool: RankPool, tmp_path: Path) -> None:
    pool.run(check_sums, functools.partial(accumulated, str(tmp_path)))


def tied(folder: str) -> bool:
    found = []
    for strategy in (None, "full_shard"):
        model = tiny_llama(tie_word_embeddings=True)
        trainer = make(folder, strategy, model)
        trainer.train()
        found.append((losses_of(trainer), weights_of(trainer)))
    return found[0][0] == found[1][0] and equal(found[0][1], found[1][1])


@ranks(2)
def test_tied_embeddings_and_frozen_layers(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(tied, str(tmp_path)) == [True, True]
    assert pool.run(frozen, str(tmp_path)) == [True, True]


def frozen(folder: str) -> bool:
    found = []
    for strategy in (None, "full_shard"):
        model = tiny_llama()
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=3)
        trainer = make(folder, strategy, model)
        trainer.optimizer, trainer.lr_scheduler = optimizer, schedule  # as optimizers=(...) sets
        trainer.train()
        found.append((losses_of(trainer), weights_of(trainer)))
    return found[0][0] == found[1][0] and equal(found[0][1], found[1][1])


@on_ranks(2)
def test_smaller_last_batches_and_a_model_init(tmp_path):
    """An epoch whose last window and last batch are smaller, of a model that the Trainer
    creates."""
    folder = str(tmp_path)
    found = []
    for strategy in (None, "full_shard"):
        new_run()
        kind = Trainer if strategy is None else zshard.transformers.shard(Trainer)
        more = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 2}
        trainer = kind(
            model_init=lambda: tiny_llama(),
            args=arguments(folder, **more),
            train_dataset=sentences(11),
            eval_dataset=sentences(3),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        found.append((losses_of(trainer), trainer.evaluate()["eval_loss"]))
    assert found[0] == found[1]


@on_ranks(2)
def test_rank_0_may_save_alone_on_one_host(tmp_path):
    """Rank 0 saves and generates alone; then all continue training from a checkpoint."""
    folder = str(tmp_path)
    shm = {"transport": "shm"}  # "auto" is what an earlier test has asked for
    trainer = make(
        folder, "full_shard", options=shm, max_steps=2, save_strategy="steps", save_steps=1
    )
    trainer.train()
    if trainer.is_world_process_zero():
        trainer.save_model(f"{folder}/alone")
        trainer.model.generate(torch.tensor([[3, 4]]), max_new_tokens=4)
    before = losses_of(trainer)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    assert losses_of(trainer) == before


# --- checkpoints ----------------------------------------------------------------------------------


def saving(folder: str, strategy: str | None, **more: Any) -> Any:
    """Return a Trainer that saves after its second of three steps with more than one batch each."""
    save = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    return make(folder, strategy, **{"max_steps": 3, **save, **more})


def save(folder: str, strategy: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    trainer = saving(folder, strategy)
    trainer.train()
    return losses_of(trainer), weights_of(trainer)


def resume(folder: str, strategy: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    trainer = saving(folder, strategy, save_strategy="no")
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return losses_of(trainer), weights_of(trainer)


FILES = {"config.json", "generation_config.json", "model.safetensors", "optimizer.pt"}
FILES |= {"rng_state_0.pth", "rng_state_1.pth", "scheduler.pt", "trainer_state.json"}
FILES |= {"training_args.bin"}


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("saved", ["full_shard", None], ids=["sharded", "ddp"])
@pytest.mark.parametrize("loaded", ["full_shard", None], ids=["sharded", "ddp"])
@ranks(2)
def test_resumed_run_has_the_same_losses(
    pool: RankPool, tmp_path: Path, saved: str | None, loaded: str | None, transport: str
) -> None:
    """Each loads the other's checkpoints."""
    before = pool.run(over, transport, save, str(tmp_path), saved)
    assert names_in(tmp_path / "checkpoint-2") == FILES
    after = pool.run(over, transport, resume, str(tmp_path), loaded)
    for (losses, weights), (resumed, again) in zip(before, after, strict=True):
        assert losses == resumed and equal(weights, again)


def over(transport: str, function: Any, *args: Any) -> Any:
    """Return the result of `function` with this transport."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZSHARD_TRANSPORT", transport)
        return function(*args)


@pytest.mark.parametrize("world", [1, 3])
def test_another_number_of_ranks_resumes(
    pools: dict[int, RankPool], pool2: RankPool, tmp_path: Path, world: int
) -> None:
    pool2.run(save, str(tmp_path), "full_shard")
    found = pools.setdefault(world, RankPool(world)).run(resume, str(tmp_path), "full_shard")
    ddp = pools[world].run(resume, str(tmp_path), None)
    for (losses, weights), (theirs, their_weights) in zip(found, ddp, strict=True):
        assert losses == theirs or world > 2  # DDP sums three ranks in another order
        for name, value in weights.items():
            torch.testing.assert_close(value, their_weights[name])


def killed(folder: str) -> None:
    """A run that loses a rank in the middle of its third step."""

    class Killer(TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and args.process_index == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = saving(folder, "full_shard")
    trainer.add_callback(Killer())
    trainer.train()


def test_killed_run_is_resumed(pool2: RankPool, tmp_path: Path) -> None:
    results = fork_ranks(killed, 2, str(tmp_path), timeout=120)
    assert results[1].returncode == -signal.SIGKILL
    assert results[0].returncode == 1 and "PeerError: rank 1" in results[0].stderr
    resumed = pool2.run(resume, str(tmp_path), "full_shard")
    assert resumed[0][0] == pool2.run(save, str(tmp_path / "again"), "full_shard")[0][0]


@on_ranks(2)
def test_best_model_is_loaded_at_the_end(tmp_path):
    folder = str(tmp_path)
    found = []
    for strategy in (None, "full_shard"):
        where = f"{folder}/{strategy}"
        steps = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "learning_rate": 0.2}
        trainer = saving(where, strategy, load_best_model_at_end=True, **steps)
        trainer.train()
        score = trainer.state.best_metric
        found.append((score, trainer.state.best_global_step, weights_of(trainer)))
        assert trainer.evaluate()["eval_loss"] == score
    assert found[0][:2] == found[1][:2] and equal(found[0][2], found[1][2])


def save_pretrained(folder: str) -> bool:
    """save_model() after training, and before."""
    trainer = make(folder, "full_shard", tiny_llama(tie_word_embeddings=True), max_steps=1)
    trainer.save_model(f"{folder}/before")
    trainer.train()
    trainer.save_model(f"{folder}/after")
    torch.distributed.barrier()
    weights = weights_of(trainer)
    again = type(tiny_llama()).from_pretrained(f"{folder}/after")
    assert again.config.architectures == ["LlamaForCausalLM"]
    return equal(dict(again.state_dict()), weights)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@ranks(2)
def test_save_model_is_for_from_pretrained(pool: RankPool, tmp_path: Path, transport: str) -> None:
    assert pool.run(over, transport, save_pretrained, str(tmp_path)) == [True, True]


# --- evaluation and generation --------------------------------------------------------------------


@on_ranks(2)
def test_evaluation_shards_the_model(tmp_path):
    """An evaluation before training shards the model, too; losses are the same as without it."""
    folder = str(tmp_path)
    trainer = make(folder, "full_shard", max_steps=3)
    first = trainer.evaluate()["eval_loss"]
    assert isinstance(trainer.model, FSDP)
    plain = make(folder, None, max_steps=3)
    assert plain.evaluate()["eval_loss"] == first
    trainer.train()
    other = make(folder, None, max_steps=3)
    other.train()
    assert losses_of(trainer) == losses_of(other)


def predicted(folder: str) -> bool:
    """predict_with_generate; prompts on each rank end after different numbers of tokens."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config
    from transformers import T5ForConditionalGeneration as T5

    found = []
    for kind in (Seq2SeqTrainer, zshard.transformers.shard(Seq2SeqTrainer)):
        new_run()
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        model = T5(T5Config(**sizes, vocab_size=64, decoder_start_token_id=0))
        args = arguments(
            folder,
            Seq2SeqTrainingArguments,
            predict_with_generate=True,
            generation_max_length=20,
            max_steps=2,
        )
        trainer = kind(
            model=model, args=args, train_dataset=sentences(8), eval_dataset=sentences(6, 1)
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        output = trainer.predict(sentences(6, seed=2), max_length=8 + 4 * args.process_index)
        found.append((losses_of(trainer), output.predictions.tolist(), output.metrics["test_loss"]))
    return found[0] == found[1]


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@ranks(2)
def test_predict_with_generate(pool: RankPool, tmp_path: Path, transport: str) -> None:
    assert pool.run(over, transport, predicted, str(tmp_path)) == [True, True]


# --- misuse ---------------------------------------------------------------------------------------


def _no_call(folder: str) -> None:
    make(folder, None, FSDP(tiny_llama())).train()


def _its_fsdp(folder: str) -> None:
    make(folder, "full_shard", fsdp=True)


def _an_object(folder: str) -> None:
    zshard.transformers.shard(make(folder, None))


def _whole_matrices(folder: str) -> None:
    make(folder, "full_shard", optim="adafactor").train()


def _watching(folder: str) -> None:
    os.environ["WANDB_WATCH"] = "all"
    make(folder, "full_shard", report_to=["wandb"])


MISUSES = {
    "wandb watches": _watching,
    "no call of shard()": _no_call,
    "its own fsdp": _its_fsdp,
    "an object": _an_object,
    "no Trainer": lambda folder: zshard.transformers.shard(dict),
    "twice": lambda folder: zshard.transformers.shard(zshard.transformers.shard(Trainer)),
    "unknown argument": lambda folder: zshard.transformers.shard(Trainer, stratgy="zero2"),
    "an optimizer of whole matrices": _whole_matrices,
    "another dtype for evaluation": lambda folder: make(
        folder, "full_shard", bf16_full_eval=True
    ).evaluate(),
}
WORDS = {
    "wandb watches": "ValueError: WANDB_WATCH=all logs full tensors of one rank",
    "no call of shard()": "TypeError: DistributedDataParallel cannot wrap a model that zshard has",
    "its own fsdp": "ValueError: this Accelerator is configured for torch's FSDP",
    "an object": "TypeError: zshard.transformers.shard() expects a class, got an object",
    "no Trainer": "TypeError: zshard.transformers.shard() expects a subclass of transformers.Trainer",
    "twice": "TypeError: Trainer already shards its models",
    "unknown argument": "TypeError: zshard.transformers.shard() takes the arguments of FSDP()",
    "an optimizer of whole matrices": "ShardError: ",
    "another dtype for evaluation": "ValueError: bf16_full_eval=True would convert the model",
}


@pytest.mark.parametrize("name", MISUSES)
@on_ranks(2)
def test_misuse_names_the_remedy(name, tmp_path):
    folder = str(tmp_path)
    new_run()
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        MISUSES[name](folder)
    for variable in ("ACCELERATE_USE_FSDP", "WANDB_WATCH"):
        os.environ.pop(variable, None)
    text = f"{caught.type.__name__}: {caught.value}"
    assert text.startswith(WORDS[name])


def test_importing_zshard_imports_no_trainer() -> None:
    code = "import sys, zshard, zshard.accelerate, zshard.transformers; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"accelerate", "transformers", "peft", "trl"} & set(done.stdout.split())
