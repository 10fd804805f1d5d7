"""DeepSpeed's learning rate schedules, and torch's by their names.

A schedule is a function from the number of the step to the learning rate (and for
OneCycle to the momentum) of each param group; stepping counts and writes. Before the first step the
number is -1, for which each schedule has a value of its own.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler

from zshard.deepspeed.config_values import check_params

_SECOND_BETA = 0.99  # that OneCycle gives Adam


class Schedule:
    """What the schedules share: counting steps, and writing to the optimizer's param groups.

    Args:
        optimizer: the optimizer whose learning rates are set.
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
        """Go to the next step, or to the one of that number."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._write()

    def _write(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
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
        highest = _lrs(optimizer) if warmup_max_lr is None else warmup_max_lr
        self._low = _per_group(optimizer, "warmup_min_lr", warmup_min_lr)
        self._high = _per_group(optimizer, "warmup_max_lr", highest)
        self._ramp = _Ramp(warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return self._low
        part = self._part()
        return [low + (high - low) * part for low, high in zip(self._low, self._high, strict=True)]

    def _part(self) -> float:
        """The part of the way from the lowest to the highest learning rate."""
        return self._ramp.at(self.last_batch_iteration)


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

    def _part(self) -> float:
        step = self.last_batch_iteration
        if step < self._ramp.steps:
            return super()._part()
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
        **arguments: Any,
    ) -> None:
        self._total = _steps("total_num_steps", total_num_steps, 1)
        self._ramp = _Ramp(warmup_num_steps, arguments.pop("warmup_type", "log"))
        self._first, self._last = warmup_min_ratio, cos_min_ratio
        self._bases = _lrs(optimizer)
        super().__init__(optimizer, **arguments)

    def get_lr(self) -> list[float]:
        return [lr * self._ratio() for lr in self._bases]

    def _ratio(self) -> float:
        step = self.last_batch_iteration
        if step < 0:
            return 0.0
        if step < self._ramp.steps:
            return self._first + self._ramp.at(step) * (1.0 - self._first)
        way = (step - self._ramp.steps + 1) / max(1, self._total - self._ramp.steps)
        wave = (1 + math.cos(math.pi * min(1.0, way))) / 2
        return max(0.0, self._last + (1.0 - self._last) * wave)


class OneCycle(Schedule):
    """A learning rate that rises from cycle_min_lr to cycle_max_lr and falls again, then decays;
    Adam's first beta moves the other way, between cycle_max_mom and cycle_min_mom.

    cycle: the options of the cycle, under DeepSpeed's names: cycle_first_step_size (2000),
    cycle_second_step_size (the first), cycle_first_stair_count (0: no stairs),
    cycle_second_stair_count (the first), cycle_momentum (True), cycle_min_mom (0.8), cycle_max_mom
    (0.9), decay_step_size (0: no decay), decay_lr_rate (0), decay_mom_rate (0).
    """

    _DEFAULTS: dict[str, Any] = {  # noqa: RUF012 - never written
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_step_size": 0,
        "decay_lr_rate": 0.0,
        "decay_mom_rate": 0.0,
    }

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        last_batch_iteration: int = -1,
        **cycle: Any,
    ) -> None:
        for name in cycle.keys() - self._DEFAULTS.keys():
            raise TypeError(f"OneCycle got an unexpected argument '{name}'")
        self._cycle = {**self._DEFAULTS, **cycle}
        self._up, self._down = self._halves()
        self._low = _per_group(optimizer, "cycle_min_lr", cycle_min_lr)
        self._high = _per_group(optimizer, "cycle_max_lr", cycle_max_lr)
        self._low_mom = _per_group(optimizer, "cycle_min_mom", self._cycle["cycle_min_mom"])
        self._high_mom = _per_group(optimizer, "cycle_max_mom", self._cycle["cycle_max_mom"])
        self._moves = bool(self._cycle["cycle_momentum"]) and "betas" in optimizer.defaults
        super().__init__(optimizer, last_batch_iteration)

    def _halves(self) -> tuple[float, float]:
        """The steps of the rise and of the fall."""
        up, down = self._cycle["cycle_first_step_size"], self._cycle["cycle_second_step_size"]
        down = up if down is None else down
        if up <= 0 or down < 0:
            raise ValueError(
                f"'cycle_first_step_size' must be positive, got {up}, and 'cycle_second_step_size' "
                f"at least 0, got {down}"
            )
        return float(up), float(down)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return self._low
        if self.last_batch_iteration < self._up + self._down:
            height = self._height()
            return [a + (b - a) * height for a, b in zip(self._low, self._high, strict=True)]
        return [lr / self._decay("decay_lr_rate") for lr in self._low]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each param group; None if they do not move."""
        if not self._moves:
            return None
        if self.last_batch_iteration < 0:
            first = self._low_mom
        elif self.last_batch_iteration < self._up + self._down:
            height = self._height()
            first = [
                b - (b - a) * height for a, b in zip(self._low_mom, self._high_mom, strict=True)
            ]
        else:
            first = [mom * self._decay("decay_mom_rate") for mom in self._high_mom]
        return [(mom, _SECOND_BETA) for mom in first]

    def _write(self) -> None:
        super()._write()
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group["betas"] = betas

    def _height(self) -> float:
        """How high the cycle is at the current step, from 0 to 1."""
        total = self._up + self._down
        place = (self.last_batch_iteration + 1) % total
        rises = place <= self._up
        way = place / self._up if rises else (total - place) / self._down
        first, second = (
            self._cycle["cycle_first_stair_count"],
            self._cycle["cycle_second_stair_count"],
        )
        stairs = first if rises or second is None else second
        return math.floor(way * stairs) / stairs if stairs > 0 else way

    def _decay(self, rate: str) -> float:
        size = self._cycle["decay_step_size"]
        if math.isclose(size, 0):
            return 1.0
        past: float = self.last_batch_iteration - (self._up + self._down) + 1
        return 1 + float(self._cycle[rate]) * past / float(size)


class _Ramp:
    """The way from 0 to 1 in a number of steps."""

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


def _lrs(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _per_group(optimizer: Optimizer, name: str, value: Any) -> list[float]:
    count = len(optimizer.param_groups)
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"'{name}' has {len(value)} values for {count} param groups")
    return list(value)


def _steps(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise TypeError(f"'{name}' must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"'{name}' must be at least {least}, got {value!r}")
    return int(value)


_OWN: dict[str, type[Schedule]] = {
    each.__name__: each for each in (OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def schedule_of(section: dict[str, Any], optimizer: Optimizer) -> Any:
    """Return the scheduler that the section "scheduler" of a config describes.

    Raises ValueError for an unknown type, TypeError or ValueError for invalid params.
    """
    name, params = section["type"], section.get("params") or {}
    kind: Any = _OWN.get(name)
    if kind is None:
        kind = getattr(lr_scheduler, name, None)
        if not inspect.isclass(kind) or not issubclass(kind, lr_scheduler.LRScheduler):
            known = ", ".join(_OWN)
            raise ValueError(
                f"unknown 'scheduler.type' {name!r} in the DeepSpeed config: expected {known}, or "
                "a class of torch.optim.lr_scheduler"
            )
    check_params("scheduler.params", kind, params)
    try:
        return kind(optimizer, **params)
    except TypeError as error:
        raise TypeError(f"'scheduler.params' in the DeepSpeed config: {error}") from None
