"""DeepSpeed configs that projects have published: where they are, and their meaning.

The files belong to their projects, so this repository does not contain them. If
ZSHARD_PUBLISHED_CONFIGS is a folder that has them under `name`, these exact files are tested; see
the checksums.

    git show <commit>:<path> > $ZSHARD_PUBLISHED_CONFIGS/<name>.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from engines import LR, Meaning

FOLDER = os.environ.get("ZSHARD_PUBLISHED_CONFIGS", "")
SCALE = {"scale": 2.0**16, "window": 1000, "hysteresis": 2}
STEPS = 5  # for "auto", beside values that follow
ARGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "learning_rate": LR,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "warmup_steps": 2,
    "max_steps": STEPS,
}
FP16 = {"dtype": torch.float16, "scale": SCALE}
WARM, DECAY = (0.0, 0.0, LR), (0.0, 0.0, LR, LR, LR * (2 / 3))


@dataclass(frozen=True)
class Published:
    """A file (Apache-2.0 like all of these), its `args`, and its meaning with them."""

    name: str
    repository: str
    commit: str
    path: str
    sha256: str
    meaning: Meaning
    args: dict[str, Any]
    client: bool = False  # whether the script creates the optimizer

    def read(self) -> dict[str, Any]:
        data = (Path(FOLDER) / f"{self.name}.json").read_bytes()
        assert hashlib.sha256(data).hexdigest() == self.sha256, f"{self.name} is another version"
        return json.loads(data)

    def namespace(self) -> argparse.Namespace:
        return argparse.Namespace(**{**ARGS, **self.args})


EXAMPLES, ACCELERATE = (
    ("microsoft/DeepSpeedExamples", "83757d9c937daabd1089a08051061706cb73900d"),
    (
        "huggingface/accelerate",
        "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
    ),
)
TEMPLATES = "examples/deepspeed_config_templates"
DECAYED = {"options": {"weight_decay": 0.1}, "clip": 0.5}
PUBLISHED = [
    Published(
        "imagenet_z1",
        *EXAMPLES,
        "training/imagenet/config/ds_fp16_z1_config.json",
        "3c2e1b5ecc3e0b088454eb14515b35bfb80297357297d24ff6c65f01b2b15995",
        Meaning(1, lrs=(1e-3,), options={"betas": (0.8, 0.999), "weight_decay": 3e-7}, **FP16),
        {},
    ),
    Published(
        "accelerate_z1",
        *ACCELERATE,
        f"{TEMPLATES}/zero_stage1_config.json",
        "fd9ca464be617c30248b0422c476c20facb7dcccaebbd4406ff06fbb6886cc98",
        Meaning(1, lrs=DECAY, **DECAYED, **FP16),
        {},
    ),
    Published(
        "accelerate_z2_offload",
        *ACCELERATE,
        f"{TEMPLATES}/zero_stage2_offload_config.json",
        "97f94ba51cdfc09ee3fc39e27f4463c180dd98c707d8c279fa4d380fe04f6e6b",
        Meaning(2, lrs=DECAY, **DECAYED, **FP16),
        {},
    ),
    Published(
        "accelerate_z3_offload",
        *ACCELERATE,
        f"{TEMPLATES}/zero_stage3_offload_config.json",
        "0162fd6c6e7c2679cff85288d1623b8e2c91a454010d8e70bcae2a5529cf2c4a",
        Meaning(3, lrs=DECAY, **DECAYED, **FP16),
        {},
    ),
    Published(
        "accelerate_tests_z2",
        *ACCELERATE,
        "tests/deepspeed/ds_config_zero2.json",
        "873a507ab5a9a6df23001cdcc244a692bef3a53478de325ca01648f842be1511",
        Meaning(2, lrs=WARM, dtype=torch.bfloat16, **DECAYED),
        {"bf16": True},
    ),
    Published(
        "fastchat_s3",
        "lm-sys/FastChat",
        "0e6d3e4beaab66f4d3f93db72541a4abab8af28d",
        "playground/deepspeed_config_s3.json",
        "3518dee43c94cb96af824677a232f76eaf8fe7c0bfed037d06eb831df36d1184",
        Meaning(3, **FP16),
        {"fp16": True},
        client=True,
    ),
    Published(
        "llava_z2",
        "haotian-liu/LLaVA",
        "c121f0432da27facab705978f83c4ada465e46fd",
        "scripts/zero2.json",
        "bb7d7a3360f8181c132e8666e6045cb75fa8a1a225d2b79148c1136fe99eaaa4",
        Meaning(2),
        {},
        client=True,
    ),
    Published(
        "llava_z3_offload",
        "haotian-liu/LLaVA",
        "c121f0432da27facab705978f83c4ada465e46fd",
        "scripts/zero3_offload.json",
        "75da1bf2bb9220e7ab1a18a4b6a1ca2bb210835d373978aa94ebc6600b5e007c",
        Meaning(3, lrs=WARM, dtype=torch.bfloat16, **DECAYED),
        {"bf16": True},
    ),
    Published(
        "llamafactory_z2_offload",
        "hiyouga/LLaMA-Factory",
        "ff6d4d12eeb035d6ce06805a5733dd7b29f2ac30",
        "examples/deepspeed/ds_z2_offload_config.json",
        "85a841627c56f9d31772d0bfed85775448eda16df12942f57bcce12804499b27",
        Meaning(2, rounds=2, clip=0.5),
        {"gradient_accumulation_steps": 2},
        client=True,
    ),
    Published(
        "alpaca",
        "tatsu-lab/stanford_alpaca",
        "761dc5bfbdeeffa89b8bff5d038781a4055f796a",
        "configs/default_offload_opt_param.json",
        "fe00173584163d33fe1e81592bcb8bc82b85879bc0120344871df7b813bb092f",
        Meaning(3, lrs=DECAY, **DECAYED),
        {},
    ),
]
