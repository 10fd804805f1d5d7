"""Configs as projects publish them: stages, offload, fp16, bf16 and "auto", with DDP's results.

A case is a config and its meaning in numbers. Without an optimizer in it, the script creates it.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import LR, Meaning, Theirs, engine_of, model, states_apart, train
from spawn import on_ranks

import zshard

SCALE = {"scale": 2.0**16, "window": 1000, "hysteresis": 2}
STEPS = 5  # for "auto", next to dependent values
ARGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "learning_rate": LR,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "warmup_steps": 2,
    "max_steps": STEPS,
}
FP16: dict[str, Any] = {"dtype": torch.float16, "scale": SCALE}
WARM, DECAY = (0.0, 0.0, LR), (0.0, 0.0, LR, LR, LR * (2 / 3))
DECAYED: dict[str, Any] = {"options": {"weight_decay": 0.1}, "clip": 0.5}
BATCH = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
WARMUP = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
ALL_AUTO = {
    **BATCH,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": ADAMW,
    "scheduler": {"type": "WarmupDecayLR", "params": {**WARMUP, "total_num_steps": "auto"}},
}
CPU = {"device": "cpu", "pin_memory": True}
NVME = {"device": "nvme", "nvme_path": "/nvme/scratch", "buffer_count": 4, "pipeline_read": True}
BUCKETS = {"overlap_comm": True, "reduce_bucket_size": 5e8, "allgather_bucket_size": "auto"}
BETAS = {"betas": (0.8, 0.99), "eps": 1e-7}
SGD_FREE = {"type": "Adam", "params": {"lr": LR, "betas": [0.8, 0.99], "eps": 1e-7, "torch_adam": True, "weight_decay": 0.0}}  # fmt: skip

CONFIGS: dict[str, tuple[dict[str, Any], Meaning, dict[str, Any]]] = {
    "z1_auto_fp16": (
        {**ALL_AUTO, "fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 1, **BUCKETS}},
        Meaning(1, lrs=DECAY, **DECAYED, **FP16),
        {"fp16": True},
    ),
    "z1_old_names": (
        {"train_batch_size": 8, "optimizer": SGD_FREE, "zero_optimization": {"stage": 1, "cpu_offload": True}},
        Meaning(1, options=BETAS),
        {},
    ),
    "z1_boolean": (
        {"train_batch_size": 8, "optimizer": SGD_FREE, "zero_optimization": True, "bfloat16": {"enabled": True}, "gradient_clipping": 0},
        Meaning(1, options=BETAS, dtype=torch.bfloat16),
        {},
    ),
    "z2_auto_offload": (
        {**ALL_AUTO, "zero_optimization": {"stage": 2, "offload_optimizer": CPU, **BUCKETS}},
        Meaning(2, lrs=DECAY, **DECAYED),
        {},
    ),
    "z2_accumulated": (
        {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "optimizer": SGD_FREE, "gradient_clipping": 0.5, "zero_optimization": {"stage": 2}},
        Meaning(2, rounds=2, clip=0.5, options=BETAS),
        {},
    ),
    "z2_fp16_static": (
        {"train_batch_size": 8, "gradient_clipping": 0, "optimizer": SGD_FREE, "fp16": {"enabled": True, "loss_scale": 64, "auto_cast": True}, "zero_optimization": {"stage": 2}},
        Meaning(2, options=BETAS, dtype=torch.float16, scale={"scale": 64.0, "is_dynamic": False}),
        {},
    ),
    "z3_auto_bf16_offload": (
        {**ALL_AUTO, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3, "offload_param": CPU, "offload_optimizer": CPU, "stage3_max_live_parameters": 1e9}},
        Meaning(3, lrs=DECAY, dtype=torch.bfloat16, **DECAYED),
        {"bf16": True},
    ),
    "z3_client": (
        {**BATCH, "fp16": {"enabled": "auto"}, "gradient_clipping": 0, "zero_optimization": {"stage": 3, **BUCKETS}},
        Meaning(3, **FP16),
        {"fp16": True},
    ),
    "z3_nvme": (
        {**BATCH, "optimizer": ADAMW, "zero_optimization": {"stage": 3, "offload_param": NVME, "offload_optimizer": NVME}, "aio": {"block_size": 1048576}},
        Meaning(3, options={"weight_decay": 0.1}),
        {},
    ),
    "z3_nvme_fp16": (
        {**ALL_AUTO, "fp16": {"enabled": True}, "zero_optimization": {"stage": 3, "offload_optimizer": NVME}},
        Meaning(3, lrs=DECAY, **DECAYED, **FP16),
        {},
    ),
    "z3_warmup_fp16": (
        {"train_batch_size": 8, "optimizer": ADAMW, "scheduler": {"type": "WarmupLR", "params": WARMUP}, "fp16": {"enabled": True}, "zero_optimization": {"stage": 3, "offload_param": CPU}},
        Meaning(3, lrs=WARM, options={"weight_decay": 0.1}, **FP16),
        {},
    ),
}  # fmt: skip


def redirected(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the config, with offload to a folder of this machine."""
    zero = config["zero_optimization"]
    for part in ("offload_param", "offload_optimizer") if zero is not True else ():
        if (zero.get(part) or {}).get("nvme_path"):
            zero = {**zero, part: {**zero[part], "nvme_path": folder}}
    return {**config, "zero_optimization": zero}


def check(config: Any, meaning: Meaning, args: Any) -> None:
    """Fail unless the config trains as its meaning, with at most one warning, on rank 0."""
    module, config = model(), redirected(config, tempfile.gettempdir())
    creates = "optimizer" not in config
    optimizer = zshard.AdamW(module.parameters(), lr=LR, weight_decay=0.0) if creates else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = engine_of(config, model=module, optimizer=optimizer, args=args)
    by_default = 0.0 if config.get("gradient_clipping") == 0 else 1.0  # DeepSpeed's
    theirs = Theirs(replace(meaning, clip=meaning.clip or by_default))
    steps = STEPS * meaning.rounds
    losses = zip(train(engine, steps), theirs.train(steps), strict=True)
    differ, apart = max(abs(a - b) for a, b in losses), states_apart(engine, theirs)
    # DDP rounds the norm for clipping differently (docs/training.md).
    exact = not theirs.has_clipped and (meaning.rounds == 1 or meaning.stage < 2)
    assert differ == apart == 0.0 if exact else max(differ, apart) < 1e-6
    assert engine.global_steps == STEPS
    assert sum("DeepSpeed" in str(each.message) for each in caught) <= (engine.global_rank == 0)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.sampled(4)
@on_ranks(2)
def test_config_trains_as_ddp(name):
    config, meaning, args = CONFIGS[name]
    check(config, meaning, argparse.Namespace(**{**ARGS, **args}))


@pytest.mark.usefixtures("group_ends")
def test_auto_without_arguments_warns_of_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    auto = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    }
    zshard.initialize(model=torch.nn.Linear(4, 4), config=auto)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and said[0].endswith(
        "train_micro_batch_size_per_gpu is 8, gradient_clipping is 1.0, optimizer.params.lr is 5e-05"
    )
    args = argparse.Namespace(
        per_device_train_batch_size=2, max_grad_norm=0.5, learning_rate=1e-3, local_rank=0
    )
    zshard.initialize(args=args, model=torch.nn.Linear(4, 4), config=auto)
    assert capsys.readouterr().out == ""
