"""The optimizer that a DeepSpeed config names, from zshard or one of torch's elementwise ones; and
the loss scale of fp16, with DeepSpeed's rules for when it grows and shrinks.

Names and defaults have DeepSpeed's meaning. So "Adam" decouples the weight decay as AdamW does,
unless adam_w_mode is false, and the weight decay is 0 unless it is set. The loss scale only counts:
zshard.GradScaler scales, unscales and searches for infinities on all ranks, and gets the scale
after each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from zshard import api
from zshard.integrations.deepspeed.keys import check_params, must_be

_TORCHS = ("Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")


def optimizer_of(section: dict[str, Any], parameters: object) -> Optimizer:
    """Return the optimizer that the section "optimizer" of a config describes.

    Raises ValueError for a type that zshard lacks, TypeError or ValueError for invalid params,
    NotImplementedError for params that would change numbers.
    """
    name, params = section["type"], dict(section.get("params") or {})
    kind = _class_of(name, params)
    if params.pop("max_grad_norm", None):
        raise ValueError(
            "'optimizer.params.max_grad_norm' has no effect: set 'gradient_clipping' instead"
        )
    check_params("optimizer.params", kind, params)
    if isinstance(params.get("betas"), list):
        params["betas"] = tuple(params["betas"])
    try:
        optimizer: Optimizer = kind(parameters, **params)
    except TypeError as error:
        raise TypeError(f"'optimizer.params' in the DeepSpeed config: {error}") from None
    return optimizer


def _class_of(name: str, params: dict[str, Any]) -> type[Any]:
    """Return the class; removes DeepSpeed's options from `params` and fills in its defaults."""
    key = name.lower()
    if key in ("adam", "adamw"):
        return _adam(key == "adamw", params)
    classes: dict[str, Any] = {kind.lower(): getattr(torch.optim, kind) for kind in _TORCHS}
    classes["sgd"] = api.SGD
    if key not in classes:
        raise ValueError(
            f"'optimizer.type' {name!r} in the DeepSpeed config is not one of Adam, AdamW, SGD, "
            f"{', '.join(_TORCHS)}: pass another one as optimizer="
        )
    kind: type[Any] = classes[key]
    return kind


def _adam(is_adamw: bool, params: dict[str, Any]) -> type[Any]:
    decouples = params.pop("adam_w_mode", True) or is_adamw
    is_torchs = params.pop("torch_adam", False)
    for key in ("fused", "foreach", "set_grad_none"):
        params.pop(key, None)
    for key in ("bias_correction", "fp32_optimizer_states"):
        if params.pop(key, True) is False:
            raise NotImplementedError(must_be(f"optimizer.params.{key}", "true", False))
    if not is_torchs:
        params.setdefault("weight_decay", 0.0)
    return api.AdamW if decouples else api.Adam


# --- the loss scale -------------------------------------------------------------------------------

_FACTOR = 2.0
_COUNTS = ("scale", "left", "steps", "last_overflow")  # the state that changes


@dataclass
class LossScale:
    """scale: the factor of the loss. is_dynamic: whether it changes. window: steps without overflow
    until it doubles. hysteresis: overflows until it is halved, counted anew after each growth, or
    with is_consecutive after each step without one. least: where it stops."""

    scale: float
    is_dynamic: bool = True
    window: int = 1000
    hysteresis: int = 2
    is_consecutive: bool = False
    least: float = 1.0
    left: int = 0
    steps: int = 0
    last_overflow: int = -1

    def __post_init__(self) -> None:
        self.left = self.left or self.hysteresis

    def update(self, overflow: bool) -> None:
        """Count a step. Raises OverflowError if it overflowed at the least scale."""
        self.steps += 1
        if not self.is_dynamic:
            return
        if not overflow:
            stable = self.steps - self.last_overflow - 2
            grows = stable > 0 and stable % self.window == 0
            if grows:
                self.scale *= _FACTOR
            if grows or self.is_consecutive:
                self.left = self.hysteresis
            return
        self.last_overflow = self.steps - 1
        if self.left > 1:
            self.left -= 1
        elif self.scale > self.least:
            self.scale = max(self.scale / _FACTOR, self.least)
        else:
            raise OverflowError(
                f"the gradients overflow at the least loss scale, {self.least:g}: use bf16"
            )

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _COUNTS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in _COUNTS:
            if self.is_dynamic or name != "scale":
                setattr(self, name, state[name])
