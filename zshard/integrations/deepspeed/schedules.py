"""DeepSpeed's learning rate schedules.

A schedule is a function from the step number to the learning rate (for OneCycle, also the momentum)
of each param group; stepping counts and writes. Before the first step the number is -1, for which
each schedule has its own value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zshard.integrations.deepspeed.keys import at_least, check_params

_SECOND_BETA = 0.99  # OneCycle gives this to Adam


class Schedule:
    """Base of the schedules: counts steps and writes to the optimizer's param groups.

    last_batch_iteration: the number of the last step, to continue a schedule; -1: none.
    """

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._write()

    def get_lr(self) -> list[float]:
        """Return the learning rate of each param group for the current step."""
        raise NotImplementedError

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

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.last_batch_iteration = state["last_batch_iteration"]


class WarmupLR(Schedule):
    """A learning rate that grows from warmup_min_lr to warmup_max_lr over warmup_num_steps steps
    (0 and 1 mean 2), logarithmically or with warmup_type="linear", and then stays.

    warmup_max_lr: None: the optimizer's learning rates.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._low = _per_group(optimizer, "warmup_min_lr", warmup_min_lr)
        self._high = _per_group(optimizer, "warmup_max_lr", warmup_max_lr)
        self._ramp = _Ramp(warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        step = self.last_batch_iteration
        return self._low if step < 0 else _between(self._low, self._high, self._part(step))

    def _part(self, step: int) -> float:
        """Return the position between the lowest and the highest learning rate, from 0 to 1."""
        return self._ramp.at(step)


class WarmupDecayLR(WarmupLR):
    """WarmupLR that then decays linearly to warmup_min_lr at step total_num_steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        **arguments: Any,
    ) -> None:
        self._total = _steps("total_num_steps", total_num_steps, 1)
        super().__init__(optimizer, warmup_max_lr=warmup_max_lr, **arguments)

    def _part(self, step: int) -> float:
        if step < self._ramp.steps:
            return self._ramp.at(step)
        return max(0.0, (self._total - step) / max(1.0, self._total - self._ramp.steps))


class WarmupCosineLR(Schedule):
    """The optimizer's learning rates times a ratio: from warmup_min_ratio to 1 over
    warmup_num_steps steps, then along a cosine to cos_min_ratio at step total_num_steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._total = _steps("total_num_steps", total_num_steps, 1)
        self._ramp = _Ramp(warmup_num_steps, warmup_type)
        self._first, self._last = warmup_min_ratio, cos_min_ratio
        self._bases = _per_group(optimizer, "lr", None)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        step, warmup = self.last_batch_iteration, self._ramp.steps
        if step < 0:
            ratio = 0.0
        elif step < warmup:
            ratio = self._first + self._ramp.at(step) * (1.0 - self._first)
        else:
            progress = min(1.0, (step - warmup + 1) / max(1, self._total - warmup))
            wave = (1 + math.cos(math.pi * progress)) / 2
            ratio = max(0.0, self._last + (1.0 - self._last) * wave)
        return [lr * ratio for lr in self._bases]


class OneCycle(Schedule):
    """A learning rate that rises from cycle_min_lr to cycle_max_lr and falls again, then decays;
    Adam's first beta moves the other way, between cycle_max_mom and cycle_min_mom.

    Args:
        cycle_first_step_size, cycle_second_step_size: the steps of the rise and of the fall; the
            second: None: as many.
        cycle_first_stair_count, cycle_second_stair_count: the stairs of each; 0: a line.
        decay_step_size: 0: no decay.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        first, second = cycle_first_step_size, cycle_second_step_size
        second = first if second is None else second
        if first <= 0 or second < 0:
            name, size = ("first", first) if first <= 0 else ("second", second)
            raise ValueError(f"'cycle_{name}_step_size' is too small: {size}")
        stairs, others = cycle_first_stair_count, cycle_second_stair_count
        self._up, self._down = float(first), float(second)
        self._stairs = stairs, stairs if others is None else others
        self._low = _per_group(optimizer, "cycle_min_lr", cycle_min_lr)
        self._high = _per_group(optimizer, "cycle_max_lr", cycle_max_lr)
        self._low_mom = _per_group(optimizer, "cycle_min_mom", cycle_min_mom)
        self._high_mom = _per_group(optimizer, "cycle_max_mom", cycle_max_mom)
        self._moves = bool(cycle_momentum) and "betas" in optimizer.defaults
        self._decay_size = float(decay_step_size)
        self._decay_rate, self._mom_rate = float(decay_lr_rate), float(decay_mom_rate)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return self._low
        if self.last_batch_iteration < self._up + self._down:
            return _between(self._low, self._high, self._height())
        return [lr / self._decay(self._decay_rate) for lr in self._low]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each param group; None if they do not move."""
        if not self._moves:
            return None
        betas = self._low_mom
        if self.last_batch_iteration >= self._up + self._down:
            betas = [mom * self._decay(self._mom_rate) for mom in self._high_mom]
        elif self.last_batch_iteration >= 0:
            betas = _between(self._high_mom, self._low_mom, self._height())
        return [(beta, _SECOND_BETA) for beta in betas]

    def _write(self) -> None:
        super()._write()
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group["betas"] = betas

    def _height(self) -> float:
        """Return the height of the cycle at the current step, from 0 to 1."""
        total = self._up + self._down
        place = (self.last_batch_iteration + 1) % total
        rises = place <= self._up
        way = place / self._up if rises else (total - place) / self._down
        stairs = self._stairs[0 if rises else 1]
        return math.floor(way * stairs) / stairs if stairs > 0 else way

    def _decay(self, rate: float) -> float:
        if math.isclose(self._decay_size, 0):
            return 1.0
        past: float = self.last_batch_iteration - (self._up + self._down) + 1
        return 1 + rate * past / self._decay_size


class _Ramp:
    def __init__(self, steps: int, kind: str) -> None:
        self.steps = max(2, _steps("warmup_num_steps", steps, 0))
        if kind not in ("log", "linear"):
            raise ValueError(f"'warmup_type' must be 'log' or 'linear', got {kind!r}")
        self._is_linear = kind == "linear"

    def at(self, step: int) -> float:
        if step >= self.steps:
            return 1.0
        if self._is_linear:
            return step / self.steps
        return 1.0 / math.log(self.steps) * math.log(step + 1)


def _between(low: list[float], high: list[float], part: float) -> list[float]:
    return [a + (b - a) * part for a, b in zip(low, high, strict=True)]


def _per_group(
    optimizer: Optimizer, name: str, value: float | Sequence[float] | None
) -> list[float]:
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


_SCHEDULES: dict[str, type[Schedule]] = {
    each.__name__: each for each in (OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def schedule_of(section: dict[str, Any], optimizer: Optimizer) -> Schedule:
    """Return the scheduler that the section "scheduler" of a config describes.

    Raises ValueError for an unknown type, TypeError or ValueError for invalid params.
    """
    name, params = section["type"], section.get("params") or {}
    if name not in _SCHEDULES:
        raise ValueError(
            f"'scheduler.type' {name!r} in the DeepSpeed config is not one of "
            f"{', '.join(_SCHEDULES)}: pass another one as lr_scheduler="
        )
    kind = _SCHEDULES[name]
    check_params("scheduler.params", kind, params)
    try:
        return kind(optimizer, **params)
    except TypeError as error:
        raise TypeError(f"'scheduler.params' in the DeepSpeed config: {error}") from None
