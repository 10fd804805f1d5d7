"""zshard.initialize(): losses, parameters and skipped steps equal those of the same training under
DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import LR, Meaning, Theirs, config, engine_of, states_apart, train
from spawn import on_ranks

FP16 = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 2, "hysteresis": 1}
SCALE = {"scale": 2.0**24, "window": 2, "hysteresis": 1}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "adam": ({"optimizer": {"type": "Adam", "params": {"lr": LR, "weight_decay": 0.1}}}, {"options": {"weight_decay": 0.1}}),
    "accumulated": ({"gradient_accumulation_steps": 3}, {"rounds": 3}),
    "clipped": ({"gradient_clipping": 0.1}, {"clip": 0.1}),
    "bf16": ({"bf16": {"enabled": True}}, {"dtype": torch.bfloat16}),
    "bf16_accumulated": (
        {"bf16": {"enabled": True}, "gradient_accumulation_steps": 3, "data_types": {"grad_accum_dtype": "fp32"}},
        {"dtype": torch.bfloat16, "rounds": 3},
    ),
    "fp16_accumulated": (
        {"fp16": {**FP16, "loss_scale": 128}, "gradient_accumulation_steps": 3},
        {"dtype": torch.float16, "rounds": 3, "scale": {"scale": 128.0, "is_dynamic": False}},
    ),
    "fp16": ({"fp16": FP16}, {"dtype": torch.float16, "scale": SCALE}),
    "fp16_clipped": (
        {"fp16": {**FP16, "loss_scale": 128}, "gradient_clipping": 0.1},
        {"dtype": torch.float16, "clip": 0.1, "scale": {"scale": 128.0, "is_dynamic": False}},
    ),
    "warmup": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": LR, "warmup_num_steps": 4, "warmup_type": "linear"}}},
        {"lrs": (0.0, 0.0, LR / 4, LR / 2, LR * 3 / 4, LR)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(6)
@on_ranks(2)
def test_training_matches_ddp(kind, stage, transport):
    changes, numbers = KINDS[kind]
    engine = engine_of(config(**changes, zero_optimization={"stage": stage}), transport)
    theirs = Theirs(Meaning(stage=stage, **numbers))
    losses = zip(train(engine, 9), theirs.train(9), strict=True)
    # Rounding may differ: of the norm for clipping (docs/training.md); and of a sum of
    # micro-batches, whose order DDP changes.
    bound = 1e-6 if "clipped" in kind or (kind == "accumulated" and stage >= 2) else 0.0
    assert max(abs(a - b) for a, b in losses) <= bound
    assert states_apart(engine, theirs) <= bound
    assert engine.skipped_steps == theirs.skipped >= (kind == "fp16")
    assert engine.cur_scale == (theirs.scale.scale if theirs.scale else 1.0)


@on_ranks(2)
def test_each_stage_has_its_strategy():
    for stage, strategy in enumerate(["no_shard", "zero1", "shard_grad_op", "full_shard"]):
        engine = engine_of(config(zero_optimization={"stage": stage}))
        assert engine.module.sharding_strategy.value == strategy


@pytest.mark.usefixtures("group_ends")
def test_single_process_needs_no_launcher() -> None:
    assert not dist.is_initialized()
    engine = engine_of()
    assert dist.get_world_size() == 1, "scripts ask for it"
    theirs = Theirs(Meaning())
    assert train(engine, 5) == theirs.train(5)
    assert states_apart(engine, theirs) == 0.0
