"""The loss scale of fp16 training, with DeepSpeed's rules for when it grows and shrinks.

This only counts. Scaling, unscaling and the search for infinities, on all ranks, are
zshard.GradScaler's; after each step it is told the scale from here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from zshard.grad_scaler import GradScaler

_FACTOR = 2.0


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
            self._grow()
            return
        self.last_overflow = self.steps - 1
        if self.left > 1:
            self.left -= 1
        elif self.scale > self.least:
            self.scale = max(self.scale / _FACTOR, self.least)
        else:
            raise OverflowError(
                f"the gradients overflow at the least loss scale, {self.least:g}: the loss or the "
                "weights are not finite, or float16 is too narrow for this model (use bf16)"
            )

    def _grow(self) -> None:
        stable = self.steps - self.last_overflow - 2
        grows = stable > 0 and stable % self.window == 0
        if grows:
            self.scale *= _FACTOR
        if grows or self.is_consecutive:
            self.left = self.hysteresis

    def state_dict(self) -> dict[str, Any]:
        return {name: asdict(self)[name] for name in ("scale", "left", "steps", "last_overflow")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        known = {field.name for field in fields(self)}
        for name, value in state.items():
            if name in known and (self.is_dynamic or name != "scale"):
                setattr(self, name, value)


class OverflowScaler(GradScaler):
    """zshard.GradScaler that tells whether the gradients that it unscaled last overflowed."""

    overflow = False

    def _unscale_grads_(self, *arguments: Any) -> dict[torch.device, torch.Tensor]:  # type: ignore[override]
        unscale: Any = super()._unscale_grads_
        found: dict[torch.device, torch.Tensor] = unscale(*arguments)
        self.overflow = any(bool(flag) for flag in found.values())
        return found
