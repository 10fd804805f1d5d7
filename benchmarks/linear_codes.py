"""AdamW whose moments are rounded to linear 8-bit codes after each step: the control of AdamW8bit.

Groups are those of AdamW8bit: 32 consecutive elements with one scale, here a float32, the largest
magnitude. First moments are multiples of 1/127 of it, second moments of 1/255. So what is small
beside its group becomes zero, and a step divides by the root of a second moment of zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import zshard
from zshard.extras.optimizers.codes import GROUP

CODES = {"exp_avg": 127, "exp_avg_sq": 255}
"""Number of codes above zero."""


class LinearAdamW(zshard.AdamW):
    """zshard.AdamW with the moments that linear codes keep. For unsharded parameters.

    Args:
        on_average: round between two codes at random, so that moments are right on average;
            otherwise to the nearest.
    """

    def __init__(self, params: Any, lr: float = 1e-3, *, on_average: bool = False) -> None:
        super().__init__(params, lr=lr)
        self._generator = torch.Generator().manual_seed(0) if on_average else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for own in self.state.values():
            for name, most in CODES.items():
                own[name].copy_(self._coded(own[name], most))
        return result

    def _coded(self, values: Tensor, most: int) -> Tensor:
        flat = values.reshape(-1)
        groups = pad(flat, (0, -flat.numel() % GROUP)).view(-1, GROUP)
        unit = (groups.abs().amax(1, keepdim=True) / most).clamp(
            min=torch.finfo(torch.float32).tiny
        )
        offset = 0.5 if self._generator is None else self._random(groups)
        return (torch.floor(groups / unit + offset) * unit).view(-1)[: flat.numel()].view_as(values)

    def _random(self, like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=self._generator)
