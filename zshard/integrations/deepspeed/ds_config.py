"""Read and check a DeepSpeed config: from a file or a dict to `Settings`.

All checks that need no model happen here, before ranks communicate. Each error names the key, the
value and the remedy.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from zshard.api import MixedPrecision, Offload, ShardingStrategy, warn
from zshard.integrations.deepspeed.keys import (
    MICRO,
    STEPS,
    TRAIN,
    ConfigValues,
    checked,
    fill,
    must_be,
)
from zshard.integrations.deepspeed.optimizers import LossScale

ACCUMULATED = "data_types.grad_accum_dtype"
_COMMENT = r"//[^\n]*|#[^\n]*|/\*.*?\*/"
_TOKEN = re.compile(  # texts, comments and trailing commas
    rf'"(?:[^"\\\n]|\\.)*"|{_COMMENT}|(?<![\[{{,]),(?=(?:\s|{_COMMENT})*[}}\]])',
    re.DOTALL,
)
_STRATEGIES = (
    ShardingStrategy.NO_SHARD,
    ShardingStrategy.ZERO1,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.FULL_SHARD,
)


class BatchSizes(NamedTuple):
    """The samples of an optimizer step over all ranks, those of a forward on one rank, and the
    number of forwards per step."""

    train: int
    micro: int
    steps: int


@dataclass(frozen=True)
class Settings:
    """The settings of a DeepSpeed config, in zshard's terms.

    values: the config with defaults for "auto". sizes: the batch sizes. stage: of ZeRO. dtype: that
    of forward and backward; None: the model's. autocast: that of torch.autocast around the forward.
    accumulated: the dtype that sums over micro-batches must have; None: any. own_disks: each host
    saves to its own disk.
    """

    values: dict[str, Any]
    sizes: BatchSizes
    stage: int
    dtype: torch.dtype | None
    autocast: torch.dtype | None
    precision: MixedPrecision | None
    accumulated: torch.dtype | None
    offload: Offload | None
    loss_scale: LossScale | None
    clipping: float
    computes_norm: bool
    skips_overflows: bool
    own_disks: bool

    @property
    def strategy(self) -> ShardingStrategy:
        return _STRATEGIES[self.stage]

    def section(self, name: str) -> dict[str, Any] | None:
        """Return "optimizer" or "scheduler" as a dict; None if the config has none."""
        section: dict[str, Any] | None = self.values.get(name)
        if not section:
            return None
        if not isinstance(section.get("type"), str):
            raise TypeError(f"'{name}.type' in the DeepSpeed config must be a string")
        return section


def read(config: object) -> dict[str, Any]:
    """Return the config as a dict, from a dict or from the path of a JSON file."""
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | os.PathLike):
        kind = type(config).__name__
        raise TypeError(f"config must be a dict or the path of a JSON file, got {kind}")
    path = os.fspath(config)
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
        # Blanks in place of comments and commas: the parser's errors keep their line and column.
        text = _TOKEN.sub(
            lambda m: m[0] if m[0].startswith('"') else re.sub(r"[^\n]", " ", m[0]), text
        )
        content = json.loads(text, object_pairs_hook=_without_duplicates)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no DeepSpeed config '{path}' (in '{os.getcwd()}'): pass its path, or a dict"
        ) from None
    except ValueError as error:
        raise ValueError(f"the DeepSpeed config '{path}' is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise TypeError(f"the DeepSpeed config '{path}' must be a JSON object, got {content!r}")
    return content


def settings_of(config: Mapping[str, Any], args: object, world: int, rank: int) -> Settings:
    """Return the settings of a config that read() returned.

    args: resolves "auto". world: the number of ranks. Rank 0 warns of keys that have no effect.

    Raises ValueError for an invalid value, TypeError for a value of the wrong type,
    NotImplementedError for what zshard does not support.
    """
    plain, ignored = checked(config)
    filled, assumed = fill(plain, args)
    settings = _settings(ConfigValues(filled), world)
    if assumed and rank == 0:
        print(
            'zshard: args= lacks values for "auto" in the DeepSpeed config, so these are the '
            f"defaults of transformers' TrainingArguments: {', '.join(assumed)}",
            flush=True,
        )
    if ignored and rank == 0:
        warn(f"zshard ignores these keys of the DeepSpeed config: {', '.join(ignored)}")
    return settings


def _settings(values: ConfigValues, world: int) -> Settings:
    stage = int(values.get("zero_optimization.stage", 0))
    if stage > 3:
        raise ValueError(must_be("zero_optimization.stage", "0, 1, 2 or 3", stage))
    operation = values.get("gradient_allreduce_op", "mean")
    if operation.lower() != "mean":
        raise NotImplementedError(must_be("gradient_allreduce_op", "'mean'", operation))
    dtype, autocast = _dtypes(values)
    wire = values.dtype("communication_data_type")
    buffers = values.dtype("data_types.buffer_dtype")
    precision = MixedPrecision(param_dtype=dtype, reduce_dtype=wire, buffer_dtype=buffers)
    accumulated = values.dtype(ACCUMULATED)
    if dtype is not None and accumulated not in (None, torch.float32):
        raise NotImplementedError(must_be(ACCUMULATED, "'fp32' with 'bf16' or 'fp16'", accumulated))
    return Settings(
        values=values.config,
        sizes=complete(values.get(TRAIN), values.get(MICRO), values.get(STEPS), world),
        stage=stage,
        dtype=dtype,
        autocast=autocast,
        precision=precision if (dtype, wire, buffers) != (None, None, None) else None,
        accumulated=accumulated,
        offload=_offload(values, stage),
        loss_scale=_loss_scale(values) if dtype is torch.float16 else None,
        clipping=float(values.get("gradient_clipping", 1.0)),  # as DeepSpeed since 0.19.3
        computes_norm=stage > 0 and values.get("zero_optimization.compute_grad_norm", True),
        skips_overflows=dtype is torch.bfloat16 and values.get("bf16.check_grad_overflow", True),
        own_disks=values.get("checkpoint.use_node_local_storage", False),
    )


def complete(train: int | None, micro: int | None, steps: int | None, world: int) -> BatchSizes:
    """Return all three batch sizes, given two of them: train is micro * steps * world.

    None: not in the config. world: the number of ranks. Raises ValueError if the sizes contradict
    each other, are too few, or a division leaves a rest.
    """
    if train is None and micro is None:
        raise ValueError(f"the DeepSpeed config has no '{TRAIN}' and no '{MICRO}': add one of them")
    train, micro, steps = (None if size is None else int(size) for size in (train, micro, steps))
    if train is None:
        assert micro is not None
        steps = steps or 1
        return BatchSizes(micro * steps * world, micro, steps)
    if micro is None and steps is None:
        steps = 1
    parts = {name: size for name, size in ((MICRO, micro), (STEPS, steps)) if size is not None}
    quotient, rest = divmod(train, math.prod(parts.values()) * world)
    if rest or not quotient or (len(parts) == 2 and quotient != 1):
        product = " * ".join(
            [*(f"{name}={size}" for name, size in parts.items()), f"{world} rank(s)"]
        )
        raise ValueError(
            f"{TRAIN}={train} is not {'' if len(parts) == 2 else 'a multiple of '}{product}: "
            "change one of them in the DeepSpeed config, or start another number of ranks"
        )
    return BatchSizes(train, micro or quotient, steps or quotient)


def _dtypes(values: ConfigValues) -> tuple[torch.dtype | None, torch.dtype | None]:
    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "torch_autocast": None}
    on = [name for name in kinds if values.get(f"{name}.enabled", False)]
    if len(on) > 1:
        raise ValueError(f"the DeepSpeed config enables {' and '.join(on)}: enable one of them")
    if on != ["torch_autocast"]:
        return kinds[on[0]] if on else None, None
    dtype = values.dtype("torch_autocast.dtype") or torch.bfloat16
    if dtype is torch.float16:
        valid = "'bfloat16' (for float16, enable 'fp16')"
        raise NotImplementedError(must_be("torch_autocast.dtype", valid, dtype))
    return None, dtype


def _loss_scale(values: ConfigValues) -> LossScale:
    static = float(values.get("fp16.loss_scale", 0.0))
    return LossScale(
        scale=static or 2.0 ** values.get("fp16.initial_scale_power", 16),
        is_dynamic=static == 0,
        window=int(values.get("fp16.loss_scale_window", 1000)),
        hysteresis=int(values.get("fp16.hysteresis", 2)),
        is_consecutive=values.get("fp16.consecutive_hysteresis", False),
        least=float(values.get("fp16.min_loss_scale", 1.0)) or 1.0,
    )


def _offload(values: ConfigValues, stage: int) -> Offload | None:
    places: list[str | None] = []  # of each part: a folder, or "" for host memory; None: stays
    for part, old_names in (("param", ("_param", "_params")), ("optimizer", ("",))):
        name = f"zero_optimization.offload_{part}"
        device, folder = values.get(f"{name}.device", "none"), values.get(f"{name}.nvme_path", "")
        if device not in ("none", "cpu", "nvme"):
            raise ValueError(must_be(f"{name}.device", "'none', 'cpu' or 'nvme'", device))
        if device == "nvme" and not folder:
            raise ValueError(must_be(f"{name}.nvme_path", "set with device 'nvme'", folder))
        is_old = any(values.get(f"zero_optimization.cpu_offload{old}") for old in old_names)
        place = {"none": "" if is_old else None, "cpu": "", "nvme": folder}[device]
        places.append(place)
    if stage == 0 or places == [None, None]:
        return None
    folders = {folder for folder in places if folder}
    if len(folders) > 1:
        raise NotImplementedError(
            f"the two 'nvme_path' in the DeepSpeed config differ ({' and '.join(sorted(folders))}):"
            " use one folder"
        )
    directory = folders.pop() if folders else None
    to_disk = directory is not None  # on CPUs, "cpu" already holds everything
    param, optimizer = (p is not None and (bool(p) or not to_disk) for p in places)
    part = "optimizer" if optimizer else "param"
    ratio = values.get(f"zero_optimization.offload_{part}.ratio", 1.0)
    return Offload(params=param, optimizer=optimizer, fraction=float(ratio), directory=directory)


def make_folder(offload: Offload | None) -> None:
    """Create the offload folder, as DeepSpeed does. Raises OSError on failure."""
    if offload is None or offload.directory is None:
        return
    try:
        os.makedirs(offload.directory, exist_ok=True)
    except OSError as error:
        text = f"{error.strerror}: set 'nvme_path' in the DeepSpeed config to a local folder"
        raise OSError(error.errno, text, os.fspath(offload.directory)) from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the key '{name}' is there twice: remove one")
    return dict(pairs)
