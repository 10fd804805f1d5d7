"""A DeepSpeed config, read and checked: from a file or a dict to `Settings`.

All checks that need no model happen here, before ranks communicate, and each error
names the key, the value and what to write.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zshard._errors import stacklevel
from zshard.compat.classes import MixedPrecision
from zshard.deepspeed.auto_values import assumed_values, fill
from zshard.deepspeed.batch_sizes import BatchSizes, complete
from zshard.deepspeed.config_values import ConfigValues, must_be
from zshard.deepspeed.json_with_comments import without_comments
from zshard.deepspeed.keys import check_keys, cleaned
from zshard.deepspeed.loss_scale import LossScale
from zshard.offload import Offload
from zshard.strategy import ShardingStrategy

_STRATEGIES = (
    ShardingStrategy.NO_SHARD,
    ShardingStrategy.ZERO1,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.FULL_SHARD,
)


@dataclass(frozen=True)
class Settings:
    """What a DeepSpeed config asks for, in zshard's terms.

    values: the config with defaults for "auto". sizes: the batch sizes. stage: of ZeRO. dtype: that
    of forward and backward; None: the model's. autocast: that of torch.autocast around the forward.
    """

    values: dict[str, Any]
    sizes: BatchSizes
    stage: int
    dtype: torch.dtype | None
    autocast: torch.dtype | None
    precision: MixedPrecision | None
    offload: Offload | None
    loss_scale: LossScale | None
    clipping: float
    computes_norm: bool
    skips_overflows: bool

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


def read(config: Any) -> dict[str, Any]:
    """Return the dict that `config` is, or that is in the JSON file of that path."""
    if isinstance(config, Mapping):
        return json.loads(json.dumps(config)) if _is_plain(config) else dict(config)
    if not isinstance(config, str | os.PathLike):
        kind = type(config).__name__
        raise TypeError(f"config must be a dict or the path of a JSON file, got {kind}")
    path = os.fspath(config)
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = without_comments(file.read())
        found = json.loads(text, object_pairs_hook=_without_duplicates)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no DeepSpeed config '{path}': pass its path, or a dict (current directory: "
            f"'{os.getcwd()}')"
        ) from None
    except ValueError as error:
        raise ValueError(
            f"the DeepSpeed config '{path}' is not valid JSON: {error} (comments and trailing "
            "commas are allowed; put keys and texts in double quotes, and a comma between entries)"
        ) from None
    if not isinstance(found, dict):
        raise TypeError(f"the DeepSpeed config '{path}' must be a JSON object, got {found!r}")
    return found


def settings_of(config: Mapping[str, Any], args: Any, world: int, rank: int) -> Settings:
    """Return the settings of a config that read() returned.

    args: tells what "auto" means. world: the number of ranks. Rank 0 warns of keys in use that have
    no meaning here.

    Raises ValueError for an unknown key or an invalid value, TypeError for a value of the wrong
    type, NotImplementedError for what zshard does not support.
    """
    plain, comments = cleaned(config)
    ignored = check_keys(plain)
    values = ConfigValues(fill(plain, args))
    stage = values.integer("zero_optimization.stage", 0, least=0)
    if stage > 3:
        raise ValueError(f"'zero_optimization.stage' must be 0, 1, 2 or 3, got {stage}")
    if values.text("gradient_allreduce_op", "mean").lower() != "mean":
        raise NotImplementedError(
            "'gradient_allreduce_op' in the DeepSpeed config must be 'mean': to sum gradients, "
            "multiply the loss by the number of ranks"
        )
    dtype, autocast = _dtypes(values)
    settings = Settings(
        values=values.config,
        sizes=_sizes(values, world),
        stage=stage,
        dtype=dtype,
        autocast=autocast,
        precision=_precision(values, dtype),
        offload=_offload(values, stage),
        loss_scale=_loss_scale(values) if dtype is torch.float16 else None,
        clipping=values.number("gradient_clipping", 0.0),
        computes_norm=stage > 0 and values.flag("zero_optimization.compute_grad_norm", True),
        skips_overflows=dtype is torch.bfloat16 and values.flag("bf16.check_grad_overflow", True),
    )
    assumed = assumed_values(plain, values.config, args)
    if assumed and rank == 0:
        print(
            'zshard: the DeepSpeed config has "auto" that args= does not tell, so these are the '
            f"defaults of transformers' TrainingArguments: {assumed}",
            flush=True,
        )
    for what, names in (("keys", ignored), ("comments", comments)):
        if names and rank == 0:
            warnings.warn(
                f"zshard ignores these {what} of the DeepSpeed config, which change no numbers: "
                + ", ".join(names),
                stacklevel=stacklevel(),
            )
    return settings


def _sizes(values: ConfigValues, world: int) -> BatchSizes:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    known = [values.integer(name, 0, least=1) or None for name in names]
    train, micro, steps = known
    return complete(train, micro, steps, world)


def _dtypes(values: ConfigValues) -> tuple[torch.dtype | None, torch.dtype | None]:
    """The dtypes of forward and backward, and of torch.autocast."""
    half, brain = values.flag("fp16.enabled", False), values.flag("bf16.enabled", False)
    cast = values.flag("torch_autocast.enabled", False)
    names = ("fp16", "bf16", "torch_autocast")
    on = [name for name, is_on in zip(names, (half, brain, cast), strict=True) if is_on]
    if len(on) > 1:
        raise ValueError(
            f"the DeepSpeed config enables {' and '.join(on)}: enable only one of them"
        )
    if not cast:
        return torch.float16 if half else torch.bfloat16 if brain else None, None
    dtype = values.dtype("torch_autocast.dtype") or torch.bfloat16
    if dtype is torch.float16:
        raise NotImplementedError(
            "'torch_autocast.dtype' in the DeepSpeed config must be 'bfloat16': for float16 with "
            "loss scaling, enable 'fp16'"
        )
    return None, dtype


def _precision(values: ConfigValues, dtype: torch.dtype | None) -> MixedPrecision | None:
    accumulated = values.dtype("data_types.grad_accum_dtype")
    if accumulated not in (None, torch.float32):
        raise NotImplementedError(
            "'data_types.grad_accum_dtype' in the DeepSpeed config must be 'fp32': zshard sums "
            "gradients in float32"
        )
    wire = values.dtype("communication_data_type")
    buffers = values.dtype("data_types.buffer_dtype")
    if (dtype, wire, buffers) == (None, None, None):
        return None
    return MixedPrecision(param_dtype=dtype, reduce_dtype=wire, buffer_dtype=buffers)


def _loss_scale(values: ConfigValues) -> LossScale:
    static = values.number("fp16.loss_scale", 0.0)
    power = values.integer("fp16.initial_scale_power", 16, least=0)
    return LossScale(
        scale=static or 2.0**power,
        is_dynamic=static == 0,
        window=values.integer("fp16.loss_scale_window", 1000, least=1),
        hysteresis=values.integer("fp16.hysteresis", 2, least=1),
        is_consecutive=values.flag("fp16.consecutive_hysteresis", False),
        least=values.number("fp16.min_loss_scale", 1.0) or 1.0,
    )


def _offload(values: ConfigValues, stage: int) -> Offload | None:
    """What is offloaded, and where to; None: nothing is."""
    place = {
        part: _place(values, f"zero_optimization.offload_{part}") for part in ("param", "optimizer")
    }
    for old, part in (("_param", "param"), ("_params", "param"), ("", "optimizer")):
        if values.flag(f"zero_optimization.cpu_offload{old}", False) and place[part] is None:
            place[part] = ""
    if stage == 0 or (place["param"] is None and place["optimizer"] is None):
        return None
    folders = {folder for folder in place.values() if folder}
    if len(folders) > 1:
        raise NotImplementedError(
            "'offload_param.nvme_path' and 'offload_optimizer.nvme_path' in the DeepSpeed config "
            f"differ: zshard offloads to one folder, not to {' and '.join(sorted(folders))}"
        )
    directory = folders.pop() if folders else None
    to_disk = directory is not None  # on CPUs, "cpu" is where everything is
    param, optimizer = (
        folder is not None and (bool(folder) or not to_disk) for folder in place.values()
    )
    part = "optimizer" if optimizer else "param"
    ratio = values.number(f"zero_optimization.offload_{part}.ratio", 1.0)
    return Offload(params=param, optimizer=optimizer, fraction=ratio, directory=directory)


def make_folder(offload: Offload | None) -> None:
    """Create the folder that is offloaded to, as DeepSpeed does. Raises OSError if it cannot."""
    if offload is None or offload.directory is None:
        return
    try:
        os.makedirs(offload.directory, exist_ok=True)
    except OSError as error:
        why = (
            f"{error.strerror}: set 'nvme_path' in the DeepSpeed config to a folder on a local disk"
        )
        raise OSError(error.errno, why, os.fspath(offload.directory)) from None


def _place(values: ConfigValues, name: str) -> str | None:
    """Where a part is offloaded to: a folder, "" for the host's memory; None: it is not."""
    device = values.text(f"{name}.device", "none")
    if device == "none":
        return None
    if device == "cpu":
        return ""
    if device != "nvme":
        raise ValueError(must_be(f"{name}.device", "'none', 'cpu' or 'nvme'", device))
    folder = values.text(f"{name}.nvme_path", "")
    if not folder:
        raise ValueError(
            f"'{name}.device' in the DeepSpeed config is 'nvme': set '{name}.nvme_path'"
        )
    return folder


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key '{twice}' is there twice")
    return found


def _is_plain(config: Mapping[str, Any]) -> bool:
    """Whether JSON can hold the config; it may have tensors as learning rates."""
    try:
        json.dumps(config)
    except (TypeError, ValueError):
        return False
    return True
