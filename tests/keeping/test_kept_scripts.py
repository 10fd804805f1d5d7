"""What zshard.Keep guarantees, tested with random scripts: whatever a script does with model,
optimizer, schedulers and random numbers, and whenever its ranks are killed, each step has the bits
of a run that nothing disturbed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from kept_training import OPTIMIZERS, Killer, losses_in, survived
from nursery import fork_ranks
from torch import Tensor, nn

import zshard
from zshard.extras.keeping.client import VARIABLE, Keeper

STEPS = 8
LOST = "and its memory is lost"
STRATEGIES = ("full_shard", "shard_grad_op", "zero1", "no_shard")
SCHEDULERS: list[Any] = [
    lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9),
    lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    lambda optimizer: torch.optim.lr_scheduler.CyclicLR(
        optimizer, 1e-3, 1e-2, 3, cycle_momentum=False
    ),
]


class Pair(nn.Module):
    """Two models in one, as of a GAN, with dropout. norm: with buffers, or without."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 40), norm(40), nn.ReLU(), nn.Dropout(0.1))
        self.first = nn.Linear(40, 1)
        self.second = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 1))

    def forward(self, x: Tensor, parts: list[str]) -> Tensor:
        x = self.body(x)
        return torch.stack([getattr(self, part)(x).square().mean() for part in parts]).sum()


class Script:
    """A training script by its seed. What it does in a step depends on the number of the step."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.seed = options["seed"]
        choose = random.Random(self.seed)
        torch.manual_seed(0)
        name = choose.choice(sorted(OPTIMIZERS.keys() - {"rounding"}))
        self.model = zshard.FSDP(
            Pair(options["norm"]),
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

    def backward(self, choose: random.Random) -> float:
        """Make gradients, in one or more micro-batches; return the loss."""
        parts = choose.choice([["first"], ["second"], ["first", "second"]])
        scaler, micro_batches = self.others[1], choose.choice([1, 1, 2])
        overflows = choose.random() < 0.1
        total = 0.0
        for last in range(micro_batches, 0, -1):
            x = torch.randn(16, 8) + random.random() + float(np.random.random())
            loss = self.model(x, parts) * (float("inf") if overflows else 1.0)
            with self.model.no_sync() if last > 1 else contextlib.nullcontext():
                scaler.scale(loss).backward()
            total += loss.item()
        if choose.random() < 0.5:
            scaler.unscale_(self.optimizer)
            self.model.clip_grad_norm_(0.1)
        return total

    def step(self, choose: random.Random, stepped: bool) -> None:
        """Do what belongs into the block."""
        scheduler, scaler, side, optimizer = self.others
        if stepped:
            scaler.step(self.optimizer)
            scaler.update()
        if choose.random() < 0.7:
            scheduler.step()
        if choose.random() < 0.5:
            optimizer.zero_grad()
            side(torch.rand(1)).sum().backward()
            optimizer.step()

    def digests(self) -> dict[str, str]:
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


def play(token: str, folder: str, options: dict[str, Any], kill: Any) -> tuple[int, dict[str, str]]:
    """Run the script to its end; return where it began, and digests of what it has then."""
    if token:
        os.environ[VARIABLE] = token
    script, saves = Script(options), Path(folder, "saves")
    kept, start = None, {"step": 0}
    if token:
        kept = zshard.Keep(script.model, script.optimizer, *script.others, checkpoints=saves)
        start = kept.recover(start)
    killer, given = Killer(kill), []
    if start["step"] == 0:
        script.seed_generators()
    log = open(Path(folder, f"losses{dist.get_rank()}"), "a")  # noqa: SIM115 - it may be killed
    for step in range(start["step"], STEPS):
        choose = random.Random(f"{options['seed']} {step}")
        killer.at("forward", step)
        stepped = choose.random() < 0.85
        loss = script.backward(choose) if stepped else 0.0
        if choose.random() < 0.3:  # the next gradients get other memory
            given.append([param.grad for param in script.model.parameters()])
        print(step, loss.hex(), file=log, flush=True)
        killer.at("backward", step)
        with kept.commit({"step": step + 1}) if kept else contextlib.nullcontext():
            script.step(choose, stepped)
            killer.at("block", step)
            before_update(lambda step=step: killer.at("update", step))
        killer.at("after", step)
        script.optimizer.zero_grad()
        if kept and choose.random() < 0.4:
            state = (script.model, script.optimizer)
            zshard.save(saves, *state, step=step + 1, extra=kept.state_dict(), overwrite=True)
    return start["step"], script.digests()


def before_update(call: Callable[[], None]) -> None:
    """Call this when all ranks have written a step, before the update of this rank."""

    def forget_older(kept: zshard.Keep) -> None:
        call()
        _forget_older(kept)

    zshard.Keep._forget_older = forget_older  # type: ignore[method-assign]


_forget_older = zshard.Keep._forget_older


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


def check(
    keeper: Keeper,
    folder: Path,
    seed: int,
    transport: str,
    planned: Sequence[tuple[Any, ...]] = (),
) -> None:
    for name in ("plain", "kept"):
        (folder / name).mkdir()
    ranks = 2 + (seed % 8 == 3)
    planned = [*planned] or kills_of(seed, 1 + seed % 3, ranks)
    said = f"random script {seed} over {transport}, killed {planned}"
    is_lost = any(LOST in kill for kill in planned)  # a checkpoint has rank 0's buffers only
    norm = nn.LayerNorm if is_lost else nn.BatchNorm1d
    options = {"seed": seed, "transport": transport, "ranks": ranks, "norm": norm}
    expected = fork_ranks(play, ranks, "", str(folder / "plain"), options, None, check=True)
    *_, found = survived(keeper, folder / "kept", options, planned, play)
    for rank, (_, digests) in enumerate(found):
        assert digests == expected[rank].value[1], said
        assert losses_in(folder / "kept", rank) == losses_in(folder / "plain", rank), said


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("seed", range(24))
def test_random_scripts(keeper: Keeper, tmp_path: Path, seed: int, transport: str) -> None:
    check(keeper, tmp_path, seed, transport)


def test_gradients_in_other_memory_than_at_the_last_commit(keeper: Keeper, tmp_path: Path) -> None:
    """A process begins with a commit without a step, and is killed in the next one."""
    check(keeper, tmp_path, 6, "shm", [("update", 1, 2), ("update", 1, 5)])
