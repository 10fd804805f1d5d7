"""The values of a DeepSpeed config, checked by key.

Which kind of value a key has is listed here once, and all values are checked as soon
as the config is read, whether or not they have an effect.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch

from zshard.deepspeed.auto_values import AUTO

_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_OFFLOADED = ("zero_optimization.offload_param", "zero_optimization.offload_optimizer")
_FLAGS = (
    *("fp16.enabled", "fp16.auto_cast", "fp16.consecutive_hysteresis"),
    *("bf16.enabled", "bf16.check_grad_overflow", "torch_autocast.enabled"),
    *("zero_optimization.cpu_offload", "zero_optimization.cpu_offload_param"),
    *("zero_optimization.cpu_offload_params", "zero_optimization.compute_grad_norm"),
    *("dataloader_drop_last", "managed_gradient_accumulation"),
)
_NUMBERS = (
    *("gradient_clipping", "fp16.loss_scale", "fp16.min_loss_scale"),
    *(f"{section}.ratio" for section in _OFFLOADED),
)
_INTEGERS = {
    "train_batch_size": 1,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "steps_per_print": 1,
    "zero_optimization.stage": 0,
    "fp16.initial_scale_power": 0,
    "fp16.loss_scale_window": 1,
    "fp16.hysteresis": 1,
}
"""With the least value of each."""

_ENDLESS = ("steps_per_print",)
"""Those that may be infinite, which means never."""

_TEXTS = (
    *("gradient_allreduce_op", "optimizer.type", "scheduler.type"),
    *(f"{section}.{key}" for section in _OFFLOADED for key in ("device", "nvme_path")),
)
_DTYPE_NAMES = (
    *("communication_data_type", "torch_autocast.dtype"),
    *("data_types.grad_accum_dtype", "data_types.buffer_dtype"),
)


class ConfigValues:
    """The values of a config by their full names, with checks of their types."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        for name in _FLAGS:
            self.flag(name, False)
        for name in _NUMBERS:
            self.number(name, 0.0)
        for name, least in _INTEGERS.items():
            self.integer(name, least, least)
        for name in _TEXTS:
            self.text(name, "")
        for name in _DTYPE_NAMES:
            self.dtype(name)

    def get(self, name: str) -> Any:
        value: Any = self.config
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return None if value == AUTO and isinstance(value, str) else value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise TypeError(must_be(name, "true or false", value))
        return default if value is None else value

    def number(self, name: str, default: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        if not is_number(value):
            raise TypeError(must_be(name, "a number", value))
        if not 0 <= value < float("inf"):
            raise ValueError(must_be(name, "finite and at least 0", value))
        return float(value)

    def integer(self, name: str, default: int, least: int) -> int:
        value = self.get(name)
        if value is None or (name in _ENDLESS and value == math.inf):
            return default
        if not is_number(value) or not math.isfinite(value) or value != int(value):
            raise TypeError(must_be(name, "an integer", value))
        if value < least:
            raise ValueError(must_be(name, f"at least {least}", value))
        return int(value)

    def text(self, name: str, default: str) -> str:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise TypeError(must_be(name, "a string", value))
        return default if value is None else value

    def dtype(self, name: str) -> torch.dtype | None:
        value = self.text(name, "")
        if value and value.lower().removeprefix("torch.") not in _DTYPES:
            raise ValueError(must_be(name, "'fp32', 'fp16' or 'bf16'", value))
        return _DTYPES[value.lower().removeprefix("torch.")] if value else None


def is_number(value: Any) -> bool:
    """Return whether a value is an int or a float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def must_be(name: str, what: str, value: Any) -> str:
    """Return the message for an invalid value."""
    return f"'{name}' in the DeepSpeed config must be {what}, got {value!r}"


def check_params(path: str, kind: Any, params: Mapping[str, Any]) -> None:
    """Check the values in `path`, the arguments of the class `kind`: numbers must be finite, and
    what has a number by default must be one, or several.

    Raises TypeError or ValueError, which names the key.
    """
    defaults = dict(getattr(kind, "_DEFAULTS", {}))
    for cls in kind.__mro__:
        if cls is not object:
            for name, parameter in inspect.signature(cls.__init__).parameters.items():
                defaults.setdefault(name, parameter.default)
    for key, value in params.items():
        given = value if isinstance(value, list | tuple) else [value]
        default = defaults.get(key)
        first = default[0] if isinstance(default, tuple) and default else default
        if is_number(first) and any(each is None or isinstance(each, str | bool) for each in given):
            raise TypeError(must_be(f"{path}.{key}", "a number", value))
        if any(isinstance(each, float) and not math.isfinite(each) for each in given):
            raise ValueError(must_be(f"{path}.{key}", "finite", value))
