"""A scenario: how a model is trained, by names; under zshard, under DDP, and as a plain model.

    adam = Scenario("net", ("full_shard", "c10d"), "zshard.AdamW")  # a case of models.py
    adam.same()  # fails unless losses and weights are DDP's, bit for bit
    adam.same(clip=0.1, micro_batches=2)  # the same of a variant
    training = adam.sharded(2)  # two steps of this rank's batches: .model, .optimizer, .losses
    training.go(2)  # two more
    assert_same(training.state(), adam.ddp(4).state(), "after four steps")

What happens after each step is a function of the training, `after`:

    adam.same(after=lambda training: training.model.eval() if training.step == 2 else None)
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from compare import assert_same
from groups import mesh_of
from models import CASES, Case, ddp, loss_of, make, make_optimizer
from torch import nn

from zshard import FSDP


def this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Training:
    """A model in training: `model` is called, `module` has the names of the plain model."""

    def __init__(self, scenario: Scenario, model: nn.Module, module: nn.Module, rank: int) -> None:
        self.scenario, self.model, self.module = scenario, model, module
        kind = scenario.optimizer
        self.optimizer: Any = kind(module) if callable(kind) else make_optimizer(kind, module)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rank = rank  # whose batches it has

    @property
    def step(self) -> int:
        """The number of steps that it has made."""
        return len(self.losses) // self.scenario.micro_batches

    def backward(self) -> None:
        """Accumulate the gradients of the next step's micro-batches."""
        count = self.scenario.micro_batches
        for last in [*[False] * (count - 1), True]:
            with contextlib.nullcontext() if last else self.no_sync():
                batch = self.scenario.case.batch(len(self.losses), self.rank)
                loss = loss_of(self.model(batch))
                loss.backward()
            self.losses.append(loss.item())

    def no_sync(self) -> Any:
        """Return the model's context of micro-batches before the last; a plain model needs none."""
        return getattr(self.model, "no_sync", contextlib.nullcontext)()

    def clip(self) -> None:
        """Clip gradients to the scenario's norm, by the model's way."""
        limit = self.scenario.clip
        if limit is None:
            return
        own = getattr(self.model, "clip_grad_norm_", None)
        parameters = self.module.parameters()
        norm = own(limit) if own else nn.utils.clip_grad_norm_(parameters, limit)
        self.norms.append(float(norm))

    def go(self, steps: int | None = None) -> Training:
        """Make the scenario's steps, or so many; return self."""
        for _ in range(self.scenario.steps if steps is None else steps):
            self.optimizer.zero_grad()
            self.backward()
            self.clip()
            self.optimizer.step()
            self.scenario.after(self)
        return self

    def state(self) -> dict[str, Any]:
        """Return the losses, and a copy of the full weights and buffers."""
        weights = {name: value.clone() for name, value in self.module.state_dict().items()}
        return {"losses": list(self.losses), "model": weights}


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A model by its name in CASES (or a Case), how it is sharded, and how it is trained.

    way: (strategy, transport), or (strategy, replicas, shards) of a hybrid strategy.
    optimizer: as in `make_optimizer`, or a function of the model. options: further ones of FSDP().
    """

    model: str | Case = "mlp"
    way: tuple[Any, ...] = ("full_shard", "shm")
    optimizer: str | Callable[[nn.Module], Any] = "zshard.AdamW"
    steps: int = 3
    micro_batches: int = 1
    clip: float | None = None
    after: Callable[[Training], Any] = lambda training: None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def case(self) -> Case:
        return self.model if isinstance(self.model, Case) else CASES[self.model]

    def but(self, **changes: Any) -> Scenario:
        """Return the scenario with other values."""
        return dataclasses.replace(self, **changes)

    def wrapped(self, seed: int = 1) -> Any:
        """Return a sharded model whose weights depend on `seed` alone."""
        strategy, *rest = self.way
        where = {"transport": rest[0]} if len(rest) == 1 else {"device_mesh": mesh_of(*rest)}
        options = {"auto_wrap_policy": self.case.policy, **where, **self.options}
        return FSDP(make(self.case.make, seed), strategy=strategy, **options)

    def sharded(self, steps: int | None = 0, seed: int = 1) -> Training:
        """Return a sharded model in training, after `steps` (None: the scenario's)."""
        model = self.wrapped(seed)
        return Training(self, model, model, this_rank()).go(steps)

    def ddp(self, steps: int | None = 0, seed: int = 1) -> Training:
        """Return the same under torch's DDP."""
        module = make(self.case.make, seed)
        model = ddp(module, find_unused_parameters=self.case.unused)
        return Training(self, model, module, this_rank()).go(steps)

    def plain(self, steps: int | None = 0, seed: int = 1, rank: int = 0) -> Training:
        """Return the same of a plain model, on the batches of `rank`."""
        module = make(self.case.make, seed)
        return Training(self, module, module, rank).go(steps)

    def same(self, **changes: Any) -> tuple[Training, Training]:
        """Fail unless losses and weights are DDP's, bit for bit; return the two trainings."""
        scenario = self.but(**changes)
        ours, theirs = scenario.sharded(None), scenario.ddp(None)
        assert_same(ours.state(), theirs.state(), f"{scenario.model} under {scenario.way}")
        assert all(torch.isfinite(torch.tensor(ours.losses)))
        return ours, theirs

    def same_under(self, ways: Iterable[tuple[Any, ...]], seed: int = 1) -> None:
        """The same for several ways to shard; DDP trains once."""
        theirs = self.ddp(None, seed).state()
        for way in ways:
            ours = self.but(way=way).sharded(None, seed).state()
            assert_same(ours, theirs, f"{self.model} under {way}")
        assert all(torch.isfinite(torch.tensor(theirs["losses"])))


def sharded(name: str, way: tuple[Any, ...], seed: int = 1) -> Any:
    """Return the sharded model of a case, whose weights depend on `seed` alone."""
    return Scenario(name, way).wrapped(seed)
