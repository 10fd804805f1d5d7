"""FSDP1's gradient scaler: zshard.GradScaler under torch's name and arguments."""

from __future__ import annotations

import torch.distributed as dist

from zshard.api import GradScaler

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(GradScaler):
    """torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler for zshard's models.

    Args:
        device: "cuda" (the default) or "cpu".
        init_scale, backoff_factor, growth_factor, growth_interval, enabled: as there.
        process_group: accepted for compatibility; no effect: the ranks of the model decide together
            whether to skip a step.

    Raises what zshard.GradScaler does.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
