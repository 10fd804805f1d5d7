"""zshard.initialize(): losses, parameters and skipped steps equal those of the same training under
DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import LR, Meaning, Theirs, config, engine_of, states_apart, train
from spawn import RankPool, on_ranks, ranks

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


def compare(kind: str, stage: int, transport: str) -> dict[str, Any]:
    changes, numbers = KINDS[kind]
    engine = engine_of(config(**changes, zero_optimization={"stage": stage}), transport)
    theirs = Theirs(Meaning(stage=stage, **numbers))
    ours, other = train(engine, 9), theirs.train(9)
    return {
        "losses": max(abs(a - b) for a, b in zip(ours, other, strict=True)),
        "apart": states_apart(engine, theirs),
        "skipped": (engine.skipped_steps, theirs.skipped),
        "scale": (engine.cur_scale, theirs.scale.scale if theirs.scale else 1.0),
    }


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(6)
@ranks(2)
def test_training_matches_ddp(pool: RankPool, kind: str, stage: int, transport: str) -> None:
    for found in pool.run(compare, kind, stage, transport):
        # Rounding may differ: of the norm for clipping (docs/training.md); and of a sum of
        # micro-batches, whose order DDP changes.
        bound = 1e-6 if "clipped" in kind or (kind, stage) in ACCUMULATED else 0.0
        assert found["apart"] <= bound and found["losses"] <= bound
        assert len({*found["skipped"]}) == 1 and len({*found["scale"]}) == 1
        assert found["skipped"][0] > 0 or kind != "fp16"


ACCUMULATED = [("accumulated", 2), ("accumulated", 3)]


@on_ranks(2)
def test_each_stage_has_its_strategy():
    engines = [engine_of(config(zero_optimization={"stage": stage})) for stage in range(4)]
    found = [engine.module.sharding_strategy.value for engine in engines]
    assert found == ["no_shard", "zero1", "shard_grad_op", "full_shard"]


def alone() -> float:
    assert not dist.is_initialized()
    engine = engine_of()
    assert dist.get_world_size() == 1, "scripts ask for it"
    theirs = Theirs(Meaning())
    assert train(engine, 5) == theirs.train(5)
    dist.destroy_process_group()
    return states_apart(engine, theirs)


def test_single_process_needs_no_launcher() -> None:
    assert alone() == 0.0
