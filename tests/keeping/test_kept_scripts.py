"""The guarantee of zshard.Keep, tested with random scripts: for any use of model, optimizer,
schedulers and random numbers, and any time of a kill, each step has the bits of an undisturbed
run."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from kept_training import OPTIMIZERS, STEPS, Net, check
from torch import Tensor, nn

import zshard
from zshard.extras.keeping.client import Keeper

LOST = "and its memory is lost"
STRATEGIES = ("full_shard", "shard_grad_op", "zero1", "no_shard")
SCHEDULERS: list[Any] = [
    lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9),
    lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    lambda optimizer: torch.optim.lr_scheduler.CyclicLR(
        optimizer, 1e-3, 1e-2, 3, cycle_momentum=False
    ),
]


class Script:
    """A training script by its seed. Each step's operations depend on its number."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.seed, self.choose, self.given = options["seed"], random.Random(), []
        choose = random.Random(self.seed)
        torch.manual_seed(0)
        name = choose.choice(sorted(OPTIMIZERS.keys() - {"rounding"}))
        self.model = zshard.FSDP(
            Net(40, options["norm"]),
            strategy=choose.choice(STRATEGIES),
            transport=options["transport"],
            auto_wrap_policy={nn.Linear} if choose.random() < 0.5 else None,
            timeout=60,
        )
        self.optimizer = OPTIMIZERS[name](list(self.model.parameters()))
        self.side = nn.Linear(1, 1)  # not sharded
        self.others = [
            choose.choice(SCHEDULERS)(self.optimizer),
            torch.amp.GradScaler("cpu", init_scale=2.0 ** choose.randrange(8), growth_interval=2),
            self.side,
            torch.optim.Adam(self.side.parameters(), lr=0.1),
        ]

    def seed_generators(self) -> None:
        seed = 100 * self.seed + dist.get_rank()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)

    def backward(self, step: int) -> str:
        """Make gradients in most steps; return the loss."""
        self.choose = random.Random(f"{self.seed} {step}")
        self.stepped = self.choose.random() < 0.85
        loss = self.micro_batches() if self.stepped else 0.0
        if self.choose.random() < 0.3:  # the next gradients get other memory
            self.given.append([param.grad for param in self.model.parameters()])
        return loss.hex()

    def micro_batches(self) -> float:
        """Make gradients, in one or more micro-batches; return the loss."""
        choose = self.choose
        scaler, late, overflows = self.others[1], choose.random() < 0.5, choose.random() < 0.1
        total = 0.0
        for last in range(choose.choice([1, 1, 2]), 0, -1):
            x = torch.randn(16, 16) + random.random() + float(np.random.random())
            loss = self.model(x, late).square().mean() * (float("inf") if overflows else 1.0)
            with self.model.no_sync() if last > 1 else contextlib.nullcontext():
                scaler.scale(loss).backward()
            total += loss.item()
        if choose.random() < 0.5:
            scaler.unscale_(self.optimizer)
            self.model.clip_grad_norm_(0.1)
        return total

    def step(self) -> None:
        """Do what belongs into the block."""
        scheduler, scaler, side, optimizer = self.others
        choose = self.choose
        if self.stepped:
            scaler.step(self.optimizer)
            scaler.update()
        if choose.random() < 0.7:
            scheduler.step()
        if choose.random() < 0.5:
            optimizer.zero_grad()
            side(torch.rand(1)).sum().backward()
            optimizer.step()

    def digest(self) -> dict[str, str]:
        """Of all that the script has at its end."""
        owners = [self.model, self.optimizer, *self.others]
        states = {type(owner).__name__: owner.state_dict() for owner in owners}
        states |= {
            "torch's": torch.rand(1),
            "Python's": random.random(),
            "NumPy's": np.random.random(),
        }
        return {
            name: hashlib.sha256(repr(_plain(state)).encode()).hexdigest()
            for name, state in states.items()
        }


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return sorted((repr(key), _plain(each)) for key, each in value.items())
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def kills_of(seed: int, count: int, ranks: int) -> list[tuple[Any, ...]]:
    choose = random.Random(-1 - seed)
    kills: list[tuple[Any, ...]] = []
    for step in sorted(choose.randrange(STEPS) for _ in range(count)):
        place = choose.choice(["forward", "backward", "block", "update", "after", "any"])
        when = choose.uniform(0, 0.1) if place == "any" else step
        kills.append((place, choose.randrange(ranks), when))
    if seed % 2:
        kills[-1] += (LOST,)
    return kills


def check_script(
    keeper: Keeper, folder: Path, seed: int, transport: str, kills: Sequence[tuple[Any, ...]] = ()
) -> None:
    ranks = 2 + (seed % 8 == 3)
    kills = [*kills] or kills_of(seed, 1 + seed % 3, ranks)
    is_lost = any(LOST in kill for kill in kills)  # a checkpoint has rank 0's buffers only
    norm = nn.LayerNorm if is_lost else nn.BatchNorm1d
    options = {"script": Script, "seed": seed, "transport": transport, "ranks": ranks, "norm": norm}
    check(keeper, folder, options, kills)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("seed", range(24))
def test_random_scripts(keeper: Keeper, tmp_path: Path, seed: int, transport: str) -> None:
    check_script(keeper, tmp_path, seed, transport)


def test_gradients_in_other_memory_than_at_the_last_commit(keeper: Keeper, tmp_path: Path) -> None:
    """A process begins with a commit without a step, and is killed in the next one."""
    check_script(keeper, tmp_path, 6, "shm", [("update", 1, 2), ("update", 1, 5)])
