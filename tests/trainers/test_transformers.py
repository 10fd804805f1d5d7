"""zshard under the Trainer of transformers: the same training as with its own DDP.

The one idea: each test runs the real Trainer on two ranks, once as it is and once as
`zshard.transformers.shard(Trainer)`, and compares.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from spawn import RankPool, ranks

pytest.importorskip("accelerate", reason="needs zshard[trainers]: make test-trainers")
pytest.importorskip("transformers", reason="needs zshard[trainers]: make test-trainers")

from accelerated import equal
from hf_trainers import arguments, losses_of, new_run, sentences, tiny_llama, weights_of
from transformers import Trainer, TrainerCallback

import zshard
import zshard.transformers
from zshard import FSDP


def make(folder: str, strategy: str | None, model: Any = None, **more: Any) -> Any:
    """A Trainer, of transformers as it is if `strategy` is None."""
    new_run()
    kind = Trainer if strategy is None else zshard.transformers.shard(Trainer, strategy=strategy)
    return kind(
        model=model or tiny_llama(),
        args=arguments(folder, **more),
        train_dataset=sentences(22),
        eval_dataset=sentences(5, seed=1),
    )


# --- training -------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 4},  # an epoch has 6 batches
    "bf16": {"bf16": True},
    "clipped": {"max_grad_norm": 0.1},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 3},
    "recomputed": {"gradient_checkpointing": True},
    "each batch synchronized": {
        "gradient_accumulation_steps": 2,
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    },
}


def compare(kind: str, strategy: str, folder: str) -> tuple[bool, float, int]:
    found = []
    for each in (None, strategy):
        trainer = make(folder, each, **KINDS[kind])
        trainer.train()
        metrics = trainer.evaluate()
        sizes = trainer.model.num_parameters(), trainer.state.total_flos
        found.append((losses_of(trainer), metrics["eval_loss"], sizes, weights_of(trainer)))
    theirs, ours = found
    assert theirs[2] == ours[2], "whole parameters are counted"
    assert theirs[3].keys() == ours[3].keys()
    apart = max(float((theirs[3][name] - ours[3][name]).abs().max()) for name in theirs[3])
    return theirs[:2] == ours[:2], apart, len(theirs[0])


@pytest.mark.parametrize("strategy", ["full_shard", "zero2", "no_shard"])
@pytest.mark.parametrize("kind", KINDS)
@ranks(2)
def test_training_is_that_of_ddp(
    pool: RankPool, tmp_path: Path, kind: str, strategy: str
) -> None:
    for same, apart, steps in pool.run(compare, kind, strategy, str(tmp_path)):
        assert steps == KINDS[kind].get("max_steps", 6)
        if kind == "clipped":
            assert apart < 1e-5
        else:
            assert same and apart == 0


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
