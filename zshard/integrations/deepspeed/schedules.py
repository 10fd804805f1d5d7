"""DeepSpeed's learning rate schedules.

A schedule is a function from the step number to the learning rate of each param group (for
OneCycle, another one to the betas); stepping counts and writes. Before the first step the number is
-1, for which each schedule has its own value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zshard.integrations.deepspeed.keys import at_least, check_params

_SECOND_BETA = 0.99  # OneCycle gives this to Adam

Values = float | Sequence[float]
Rates = Callable[[int], list[float]]
"""The step number -> a value for each param group."""


class Schedule:
    """Counts steps, and writes learning rates, and first betas if they move, to the optimizer's
    param groups."""

    def __init__(self, optimizer: Optimizer, rates: Rates, betas: Rates | None = None) -> None:
        self.optimizer, self._rates, self._betas = optimizer, rates, betas
        self.last_batch_iteration = -1
        self._write()

    def get_lr(self) -> list[float]:
        """Return the learning rate of each param group for the current step."""
        return self._rates(self.last_batch_iteration)

    def get_last_lr(self) -> list[Any]:
        """Return the learning rates that the optimizer has."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance to the next step, or to the one of that number."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._write()

    def _write(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        if self._betas is not None:
            betas = self._betas(self.last_batch_iteration)
            for group, beta in zip(self.optimizer.param_groups, betas, strict=True):
                group["betas"] = beta, _SECOND_BETA

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.last_batch_iteration = state["last_batch_iteration"]


def WarmupLR(
    optimizer: Optimizer,
    warmup_min_lr: Values = 0.0,
    warmup_max_lr: Values | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Schedule:
    """A learning rate that grows from warmup_min_lr to warmup_max_lr over warmup_num_steps steps
    (0 and 1 mean 2), logarithmically or with warmup_type="linear", and then stays.

    warmup_max_lr: None: the optimizer's learning rates.
    """
    low = _per_group(optimizer, "warmup_min_lr", warmup_min_lr)
    high = _per_group(optimizer, "warmup_max_lr", warmup_max_lr)
    _, ramp = _ramp(warmup_num_steps, warmup_type)
    return Schedule(optimizer, lambda i: low if i < 0 else _between(low, high, ramp(i)))


def WarmupDecayLR(
    optimizer: Optimizer,
    total_num_steps: int,
    warmup_min_lr: Values = 0.0,
    warmup_max_lr: Values | None = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Schedule:
    """WarmupLR that then decays linearly to warmup_min_lr at step total_num_steps."""
    total = _steps("total_num_steps", total_num_steps, 1)
    low = _per_group(optimizer, "warmup_min_lr", warmup_min_lr)
    high = _per_group(optimizer, "warmup_max_lr", warmup_max_lr)
    warmup, ramp = _ramp(warmup_num_steps, warmup_type)

    def rates(step: int) -> list[float]:
        if step < warmup:
            return low if step < 0 else _between(low, high, ramp(step))
        return _between(low, high, max(0.0, (total - step) / max(1.0, total - warmup)))

    return Schedule(optimizer, rates)


def WarmupCosineLR(
    optimizer: Optimizer,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
) -> Schedule:
    """The optimizer's learning rates times a ratio: from warmup_min_ratio to 1 over
    warmup_num_steps steps, then along a cosine to cos_min_ratio at step total_num_steps."""
    total = _steps("total_num_steps", total_num_steps, 1)
    warmup, ramp = _ramp(warmup_num_steps, warmup_type)
    bases = _per_group(optimizer, "lr", None)

    def rates(step: int) -> list[float]:
        ratio = 0.0
        if step >= warmup:
            progress = min(1.0, (step - warmup + 1) / max(1, total - warmup))
            wave = (1 + math.cos(math.pi * progress)) / 2
            ratio = max(0.0, cos_min_ratio + (1.0 - cos_min_ratio) * wave)
        elif step >= 0:
            ratio = warmup_min_ratio + ramp(step) * (1.0 - warmup_min_ratio)
        return [lr * ratio for lr in bases]

    return Schedule(optimizer, rates)


def OneCycle(
    optimizer: Optimizer,
    cycle_min_lr: Values,
    cycle_max_lr: Values,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
    cycle_momentum: bool = True,
    cycle_min_mom: Values = 0.8,
    cycle_max_mom: Values = 0.9,
    decay_mom_rate: float = 0.0,
) -> Schedule:
    """A learning rate that rises from cycle_min_lr to cycle_max_lr and falls again, then decays;
    Adam's first beta moves the other way, between cycle_max_mom and cycle_min_mom.

    Args:
        cycle_first_step_size, cycle_second_step_size: the steps of the rise and of the fall; the
            second: None: as many.
        cycle_first_stair_count, cycle_second_stair_count: the stairs of each; 0: a line.
        decay_step_size: 0: no decay.
    """
    up, down = cycle_first_step_size, cycle_second_step_size
    down = up if down is None else down
    if up <= 0 or down < 0:
        name, size = ("first", up) if up <= 0 else ("second", down)
        raise ValueError(f"'cycle_{name}_step_size' is too small: {size}")
    total = up + down
    rises, falls = cycle_first_stair_count, cycle_second_stair_count
    falls = rises if falls is None else falls

    low = _per_group(optimizer, "cycle_min_lr", cycle_min_lr)
    high = _per_group(optimizer, "cycle_max_lr", cycle_max_lr)

    def moved(step: int, outer: list[float], inner: list[float]) -> list[float]:
        """Return what moves from the outer values to the inner ones and back, and then stays."""
        if step < 0 or step >= total:
            return outer
        place = (step + 1) % total
        part, stairs = (place / up, rises) if place <= up else ((total - place) / down, falls)
        return _between(outer, inner, math.floor(part * stairs) / stairs if stairs > 0 else part)

    def decay(step: int, rate: float) -> float:
        return 1 + rate * max(0, step - total + 1) / decay_step_size if decay_step_size else 1.0

    def rates(step: int) -> list[float]:
        return [lr / decay(step, decay_lr_rate) for lr in moved(step, low, high)]

    least = _per_group(optimizer, "cycle_min_mom", cycle_min_mom)
    most = _per_group(optimizer, "cycle_max_mom", cycle_max_mom)

    def betas(step: int) -> list[float]:
        first = least if step < 0 else moved(step, most, least)
        return [beta * decay(step, decay_mom_rate) for beta in first]

    moves = cycle_momentum and "betas" in optimizer.defaults
    return Schedule(optimizer, rates, betas if moves else None)


def _ramp(steps: int, kind: str) -> tuple[int, Callable[[int], float]]:
    """Return the steps of a warmup, and its height at a step, from 0 to 1."""
    steps = max(2, _steps("warmup_num_steps", steps, 0))
    if kind not in ("log", "linear"):
        raise ValueError(f"'warmup_type' must be 'log' or 'linear', got {kind!r}")

    def height(step: int) -> float:
        if step >= steps:
            return 1.0
        return step / steps if kind == "linear" else 1.0 / math.log(steps) * math.log(step + 1)

    return steps, height


def _between(low: list[float], high: list[float], part: float) -> list[float]:
    return [a + (b - a) * part for a, b in zip(low, high, strict=True)]


def _per_group(optimizer: Optimizer, name: str, value: Values | None) -> list[float]:
    """Return a value per param group; None: the optimizer's learning rates."""
    if value is None:
        return [float(group["lr"]) for group in optimizer.param_groups]
    count = len(optimizer.param_groups)
    if not isinstance(value, list | tuple):
        return [value] * count  # type: ignore[list-item]
    if len(value) != count:
        raise ValueError(f"'{name}' has {len(value)} values for {count} param groups")
    return list(value)


def _steps(name: str, value: Any, least: int) -> int:
    at_least(least)(f"scheduler.params.{name}", value)
    return int(value)


_SCHEDULES: dict[str, Callable[..., Schedule]] = {
    each.__name__: each for each in (OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def schedule_of(section: dict[str, Any], optimizer: Optimizer) -> Schedule:
    """Return the scheduler that the section "scheduler" of a config describes.

    Raises ValueError for an unknown type, TypeError or ValueError for invalid params.
    """
    name, params = section["type"], dict(section.get("params") or {})
    if name not in _SCHEDULES:
        raise ValueError(
            f"'scheduler.type' {name!r} in the DeepSpeed config is not one of "
            f"{', '.join(_SCHEDULES)}: pass another one as lr_scheduler="
        )
    if params.pop("last_batch_iteration", -1) != -1:
        raise ValueError("'scheduler.params.last_batch_iteration': omit it; load a checkpoint")
    check_params("scheduler.params", _SCHEDULES[name], params)
    try:
        return _SCHEDULES[name](optimizer, **params)
    except TypeError as error:
        raise TypeError(f"'scheduler.params' in the DeepSpeed config: {error}") from None
