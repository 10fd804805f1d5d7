"""Training through Accelerate, with its own DDP or with zshard, for the tests of adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from nursery import fork_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def forget_accelerate() -> None:
    """Accelerate keeps one state per process: standing ranks begin each test without it."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._shared_state.clear()


def fork_trainers(function: Any, *args: Any, env: dict[str, str] | None = None) -> list[Any]:
    """Return what function(*args) returns on each of two ranks. function: or the path of a script."""
    import preload

    if isinstance(function, Path):
        function, args = preload.run_script, (str(function), *args)
    done = fork_ranks(preload.call, 2, function, *args, env=env, check=True, timeout=200)
    return [each.value for each in done]


def small_model(seed: int = 0) -> nn.Sequential:
    """Return a model wide enough for every rank to have a shard, of entire pages."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for width in (8, 64, 64):
        layers += [nn.Linear(width, 64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, 3))


class Run:
    """An Accelerator with a model, an optimizer, a scheduler and a loader, prepared.

    strategy: None for Accelerate's own DDP, otherwise the strategy that zshard uses. options: more
    arguments of FSDP(). arguments: of Accelerator().
    """

    def __init__(
        self,
        strategy: str | None = "full_shard",
        size: int = 44,
        shuffle: bool = True,
        build: Callable[[], nn.Module] = small_model,
        options: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        from accelerate import Accelerator
        from accelerate.utils import set_seed

        import zshard.accelerate

        forget_accelerate()
        set_seed(0)
        self.accelerator = Accelerator(cpu=True, **arguments)
        if strategy is not None:
            zshard.accelerate.shard(self.accelerator, strategy=strategy, **(options or {}))
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=40)
        data = TensorDataset(torch.randn(size, 8), torch.randn(size, 3))
        loader = DataLoader(data, batch_size=4, shuffle=shuffle)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )

    def epoch(self, clip: float | None = None, clip_value: float | None = None) -> list[float]:
        """Train on all batches; return the losses of all ranks."""
        losses = []
        for inputs, targets in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = F.mse_loss(self.model(inputs), targets)
                self.accelerator.backward(loss)
                if clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                if clip_value is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_value_(self.model.parameters(), clip_value)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses += self.accelerator.gather(loss.detach()).tolist()
        return losses

    def state(self) -> dict[str, torch.Tensor]:
        """Return the full state dict, under the plain model's names."""
        return dict(self.accelerator.get_state_dict(self.model))


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def names_in(folder: str | Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}
