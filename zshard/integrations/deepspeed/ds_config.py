"""Read and check a DeepSpeed config: from a file or a dict to `Settings`.

All checks that need no model happen here, before ranks communicate. Each error names the key, the
value and the remedy.
"""

from __future__ import annotations

import json
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
            text = _TOKEN.sub(_blank, file.read())
        content = json.loads(text, object_pairs_hook=_without_duplicates)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no DeepSpeed config '{path}': pass its path, or a dict (current directory: "
            f"'{os.getcwd()}')"
        ) from None
    except ValueError as error:
        raise ValueError(
            f"the DeepSpeed config '{path}' is not valid JSON: {error} (comments and trailing "
            "commas are allowed; put {...} around the whole, keys and texts in double quotes, and "
            "a comma between entries)"
        ) from None
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
            'zshard: the DeepSpeed config has "auto" that args= does not tell, so these are the '
            f"defaults of transformers' TrainingArguments: {', '.join(assumed)}",
            flush=True,
        )
    if ignored and rank == 0:
        warn(
            f"zshard ignores these keys of the DeepSpeed config: {', '.join(ignored)}; "
            "docs/deepspeed.md lists those that work"
        )
    return settings


def _settings(values: ConfigValues, world: int) -> Settings:
    stage = int(values.get("zero_optimization.stage", 0))
    if stage > 3:
        raise ValueError(f"'zero_optimization.stage' must be 0, 1, 2 or 3, got {stage}")
    if values.get("gradient_allreduce_op", "mean").lower() != "mean":
        raise NotImplementedError(
            "'gradient_allreduce_op' in the DeepSpeed config must be 'mean': to sum gradients, "
            "multiply the loss by the number of ranks"
        )
    dtype, autocast = _dtypes(values)
    wire = values.dtype("communication_data_type")
    buffers = values.dtype("data_types.buffer_dtype")
    precision = MixedPrecision(param_dtype=dtype, reduce_dtype=wire, buffer_dtype=buffers)
    accumulated = values.dtype(ACCUMULATED)
    if dtype is not None and accumulated not in (None, torch.float32):
        raise NotImplementedError(
            f"'{ACCUMULATED}' in the DeepSpeed config must be 'fp32' with 'bf16' or 'fp16': zshard "
            "then keeps float32 parameters, and sums micro-batches in the parameters' dtype"
        )
    train, micro, steps = (values.get(name) for name in (TRAIN, MICRO, STEPS))
    return Settings(
        values=values.config,
        sizes=complete(train, micro, steps, world),
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
    train, micro, steps = (None if each is None else int(each) for each in (train, micro, steps))
    if steps is None:
        both = train is not None and micro is not None
        steps = _divided(train or 0, MICRO, micro or 0, world) if both else 1
    if micro is None:
        micro = _divided(train or 0, STEPS, steps, world)
    train = micro * steps * world if train is None else train
    if train != micro * steps * world:
        raise ValueError(
            f"{TRAIN}={train} is not {MICRO}={micro} * {STEPS}={steps} * {world} rank(s), which "
            f"is {micro * steps * world}: leave one of them out of the DeepSpeed config, or start "
            "another number of ranks"
        )
    return BatchSizes(train, micro, steps)


def _divided(train: int, name: str, size: int, world: int) -> int:
    quotient, rest = divmod(train, size * world)
    if rest or not quotient:
        raise ValueError(
            f"{TRAIN}={train} is not a multiple of {name}={size} * {world} rank(s): choose a "
            f"multiple of {size * world}, or start another number of ranks"
        )
    return quotient


def _dtypes(values: ConfigValues) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return the dtypes of forward and backward, and of torch.autocast."""
    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "torch_autocast": None}
    on = [name for name in kinds if values.get(f"{name}.enabled", False)]
    if len(on) > 1:
        raise ValueError(
            f"the DeepSpeed config enables {' and '.join(on)}: enable only one of them"
        )
    if on != ["torch_autocast"]:
        return kinds[on[0]] if on else None, None
    dtype = values.dtype("torch_autocast.dtype") or torch.bfloat16
    if dtype is torch.float16:
        raise NotImplementedError(
            "'torch_autocast.dtype' in the DeepSpeed config must be 'bfloat16': for float16 with "
            "loss scaling, enable 'fp16'"
        )
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
    """Return the Offload of the config; None: nothing is offloaded."""
    places = []
    for part, old_names in (("param", ("_param", "_params")), ("optimizer", ("",))):
        place = _place(values, f"zero_optimization.offload_{part}")
        is_old = any(values.get(f"zero_optimization.cpu_offload{name}") for name in old_names)
        places.append("" if place is None and is_old else place)
    if stage == 0 or places == [None, None]:
        return None
    folders = {folder for folder in places if folder}
    if len(folders) > 1:
        raise NotImplementedError(
            "'offload_param.nvme_path' and 'offload_optimizer.nvme_path' in the DeepSpeed config "
            f"differ ({' and '.join(sorted(folders))}): use one folder for both"
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
        how = "set 'nvme_path' in the DeepSpeed config to a folder on a local disk"
        why = f"{error.strerror}: {how}"
        raise OSError(error.errno, why, os.fspath(offload.directory)) from None


def _place(values: ConfigValues, name: str) -> str | None:
    """Return the target of an offloaded part: a folder, or "" for host memory; None: not
    offloaded."""
    device: str = values.get(f"{name}.device", "none")
    if device in ("none", "cpu"):
        return None if device == "none" else ""
    if device != "nvme":
        raise ValueError(must_be(f"{name}.device", "'none', 'cpu' or 'nvme'", device))
    folder: str = values.get(f"{name}.nvme_path", "")
    if not folder:
        raise ValueError(
            f"'{name}.device' in the DeepSpeed config is 'nvme': set '{name}.nvme_path'"
        )
    return folder


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the key '{name}' is there twice: remove one")
    return dict(pairs)


def _blank(token: re.Match[str]) -> str:
    """Replace a comment or comma by blanks, so that a parser's errors name the right line and
    column."""
    is_string = token[0].startswith('"')
    return token[0] if is_string else re.sub(r"[^\n]", " ", token[0])
