"""DeepSpeed's learning rate schedules and loss scale, number by number.

DeepSpeed 0.19.8's own schedules, and its documentation, gave the numbers once; they are written
here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zshard.integrations.deepspeed.optimizers import LossScale
from zshard.integrations.deepspeed.schedules import schedule_of


def optimizer(lr: float = 0.2, groups: int = 1) -> torch.optim.Optimizer:
    params = [{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in range(groups)]
    return torch.optim.AdamW(params, lr=lr)


def run(kind: str, steps: int = 8, **params: Any) -> tuple[list[float], list[float]]:
    """Return the learning rates and first betas of the first steps."""
    stepped = optimizer()
    schedule = schedule_of({"type": kind, "params": params}, stepped)
    lrs, betas = [], []
    for _ in range(steps):
        lrs.append(round(stepped.param_groups[0]["lr"], 6))
        betas.append(round(stepped.param_groups[0]["betas"][0], 6))
        schedule.step()
    return lrs, betas


CASES: dict[str, Any] = {
    "log": ("WarmupLR", {"warmup_max_lr": 0.1, "warmup_num_steps": 4}, [0, 0, 0.05, 0.079248, 0.1, 0.1]),
    "linear": ("WarmupLR", {"warmup_min_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"}, [0.1, 0.1, 0.125, 0.15, 0.175, 0.2]),
    "one step": ("WarmupLR", {"warmup_num_steps": 0}, [0, 0, 0.2, 0.2]),
    "decay": ("WarmupDecayLR", {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_max_lr": 0.1}, [0, 0, 0.1, 0.1, 0.075, 0.05, 0.025, 0]),
    "cosine": ("WarmupCosineLR", {"total_num_steps": 6, "warmup_num_steps": 2, "cos_min_ratio": 0.1}, [0, 0, 0.2, 0.17364, 0.11, 0.04636, 0.02, 0.02]),
    "cycle": ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.3, "cycle_first_step_size": 2, "decay_step_size": 1, "decay_lr_rate": 1.0}, [0.1, 0.2, 0.3, 0.2, 0.1, 0.05, 0.033333]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_schedule_matches_deepspeed(case: str) -> None:
    kind, params, expected = CASES[case]
    assert run(kind, len(expected), **params)[0] == pytest.approx(expected, abs=1e-6)


def test_one_cycle_moves_the_momentum_the_other_way() -> None:
    betas = run("OneCycle", 6, cycle_min_lr=0.1, cycle_max_lr=0.3, cycle_first_step_size=2)[1]
    assert betas == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9, 0.9])


def test_schedule_resumes_from_its_state() -> None:
    first, second = (schedule_of({"type": "WarmupLR"}, optimizer(groups=2)) for _ in range(2))
    for _ in range(5):
        first.step()
    second.load_state_dict(first.state_dict())
    second.step()
    first.step()
    assert first.get_last_lr() == second.get_last_lr() and len(first.get_lr()) == 2


def scales(overflows: str, **options: Any) -> list[float]:
    """Return the loss scale after each step; "x" is an overflow."""
    scale = LossScale(scale=16.0, window=2, **options)
    found = []
    for each in overflows:
        scale.update(each == "x")
        found.append(scale.scale)
    return found


def test_loss_scale_matches_deepspeed() -> None:
    assert scales("xx", hysteresis=1) == [8, 4]
    assert scales("xxx", hysteresis=2) == [16, 8, 4], "the first is forgiven, once"
    assert scales("x....", hysteresis=1) == [8, 8, 8, 16, 16]
    assert scales("x.x", hysteresis=2) == [16, 16, 8]
    assert scales("x.x", hysteresis=2, is_consecutive=True) == [16, 16, 16]
    assert scales("xx..", is_dynamic=False) == [16] * 4
    with pytest.raises(OverflowError, match="at the least loss scale, 8"):
        scales("xx", hysteresis=1, least=8.0)
