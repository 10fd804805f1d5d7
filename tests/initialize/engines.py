"""Runs of zshard.initialize() and, for comparison, the same training written out over DDP.

`Ours` only calls the engine, as a script for DeepSpeed would. `Theirs` has no engine and no config:
a test states the config's meaning in numbers, so that a wrong reading shows.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Mlp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zshard
from zshard.integrations.deepspeed.optimizers import LossScale

LR = 0.01


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def batch(step: int, of: int | None = None, size: int = 4) -> tuple[Tensor, Tensor]:
    """Return this rank's batch, or that of another."""
    seed = torch.Generator().manual_seed(1000 * (rank() if of is None else of) + step)
    return torch.randn(size, 7, generator=seed), torch.randn(size, 3, generator=seed)


def model() -> nn.Module:
    torch.manual_seed(5)
    return Mlp()


def config(**changes: Any) -> dict[str, Any]:
    """Return a config that works, with these sections replaced; None removes one."""
    found = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {"stage": 3},
        "gradient_clipping": 0,
    }
    found.update(changes)
    return {name: value for name, value in found.items() if value is not None}


def engine_of(given: Any = None, transport: str = "shm", **arguments: Any) -> Any:
    arguments.setdefault("model", model())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZSHARD_TRANSPORT", transport)
        return zshard.initialize(config=config() if given is None else given, **arguments)[0]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


def train(engine: Any, steps: int, start: int = 0) -> list[float]:
    """Return the losses of micro-batches."""
    losses = []
    for step in range(start, start + steps):
        inputs, targets = batch(step)
        loss = loss_of(engine(inputs), targets)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


@dataclass
class Meaning:
    """The meaning of a config, in numbers."""

    stage: int = 3
    rounds: int = 1  # micro-batches per optimizer step
    lrs: Sequence[float] = (LR,)  # of the optimizer steps; the last one stays
    options: dict[str, Any] = field(default_factory=dict)  # of AdamW
    clip: float = 0.0
    dtype: torch.dtype | None = None
    scale: dict[str, Any] | None = None  # of the loss, in fp16


class Theirs:
    """The same training over DDP; in bf16 and fp16, with float32 copies that are stepped, and
    gradients sent in the low dtype and summed in float32, as in zshard's mixed precision. At stages
    0 and 1 those of a round are summed first, in float32; stage 0 sends them in it."""

    def __init__(self, meaning: Meaning) -> None:
        self.meaning = meaning
        self.main = model()
        options = {"weight_decay": 0.0, **meaning.options}
        self.optimizer = zshard.AdamW(self.main.parameters(), lr=1.0, **options)
        self.scale = LossScale(**meaning.scale) if meaning.scale is not None else None
        self.low = copy.deepcopy(self.main).to(meaning.dtype) if meaning.dtype else None
        self.ddp = None if self.low is not None else self._wrapped()
        self.steps = self.skipped = 0
        self.has_clipped = False  # whether a norm exceeded the limit

    def _wrapped(self) -> Any:
        return DistributedDataParallel(self.main) if dist.is_initialized() else self.main

    def train(self, steps: int, start: int = 0) -> list[float]:
        losses = []
        for step in range(start, start + steps):
            ends = (step + 1) % self.meaning.rounds == 0
            losses.append(self._low(step, ends) if self.ddp is None else self._full(step, ends))
            if ends:
                self._update()
        return losses

    def _full(self, step: int, ends: bool) -> float:
        inputs, targets = batch(step)
        sums = ends or self.meaning.stage >= 2 or not dist.is_initialized()
        with contextlib.nullcontext() if sums else self.ddp.no_sync():
            loss = loss_of(self.ddp(inputs), targets)
            (loss / self.meaning.rounds).backward()
        return loss.item()

    def _low(self, step: int, ends: bool) -> float:
        assert self.low is not None
        inputs, targets = batch(step)
        with torch.no_grad():
            for low, main in zip(self.low.parameters(), self.main.parameters(), strict=True):
                low.copy_(main)
        self.low.zero_grad()
        loss = loss_of(self.low(inputs.to(self.meaning.dtype)), targets)
        scale = self.scale.scale if self.scale is not None else 1.0
        (loss / self.meaning.rounds * scale).backward()
        sums, travels = self.meaning.stage < 2, self.meaning.dtype
        if self.meaning.stage == 0:
            travels = torch.float32
        for low, main in zip(self.low.parameters(), self.main.parameters(), strict=True):
            new = low.grad.float() if sums else averaged(low.grad)
            main.grad = new if main.grad is None else main.grad + new
            if sums and ends:
                main.grad = averaged(main.grad.to(travels))
        return loss.item()

    def _update(self) -> None:
        grads = [p.grad for p in self.main.parameters()]
        overflow = False
        if self.scale is not None:
            for grad in grads:
                grad.mul_(1.0 / self.scale.scale)
            overflow = not all(bool(grad.isfinite().all()) for grad in grads)
        if self.meaning.clip:
            norm = torch.nn.utils.clip_grad_norm_(self.main.parameters(), self.meaning.clip)
            self.has_clipped |= bool(norm > self.meaning.clip)
        if not overflow:
            lrs = self.meaning.lrs
            self.optimizer.param_groups[0]["lr"] = lrs[min(self.steps, len(lrs) - 1)]
            self.optimizer.step()
            self.steps += 1
        self.skipped += overflow
        if self.scale is not None:
            self.scale.update(overflow)
        self.optimizer.zero_grad()


def averaged(grad: Tensor) -> Tensor:
    """Return the mean over ranks of a gradient in a low dtype, summed in float32."""
    if not dist.is_initialized():
        return grad.float()
    parts = [torch.empty_like(grad, dtype=torch.float32) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, grad.float())
    return sum(parts[1:], parts[0]) / len(parts)


def states_apart(engine: Any, theirs: Theirs) -> float:
    """Return the largest difference between parameters."""
    ours, other = engine.module.state_dict(), theirs.main.state_dict()
    return max(float((ours[name] - other[name]).abs().max()) for name in other)
