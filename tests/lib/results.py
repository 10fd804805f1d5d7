"""Ways for a result to leave a forward other than its return value, for tests of backward.

Each way is a block whose result the model extracts again, so that all train the same network, and a
plain model gives the expected gradients.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from models import Block, loss_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 9


class Slotted:
    """An object without a __dict__."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Way(NamedTuple):
    """How a block passes its result, and how the model gets it."""

    give: Callable[[nn.Module, Tensor, list[Any]], Any]
    take: Callable[[nn.Module, Any, list[Any]], Tensor]


def _into_box(module: nn.Module, y: Tensor, box: list[Any]) -> None:
    box.append(y)


def _onto_module(module: nn.Module, y: Tensor, box: list[Any]) -> Tensor:
    module.kept = y  # type: ignore[assignment]
    return y.detach()


def _deep(module: nn.Module, y: Tensor, box: list[Any]) -> list[Any]:
    found: list[Any] = [y]
    for _ in range(12):
        found = [found]
    return found


def _from_deep(module: nn.Module, out: Any, box: list[Any]) -> Any:
    while isinstance(out, list):
        out = out[0]
    return out


def _written_view(module: nn.Module, out: Any, box: list[Any]) -> Tensor:
    out[0].add_(out[0] * 0.5)
    return out[0]


WAYS = {
    "a tensor": Way(lambda m, y, box: y, lambda m, out, box: out),
    "a tuple": Way(lambda m, y, box: (y, y.mean()), lambda m, out, box: out[0] + out[1]),
    "a dict": Way(lambda m, y, box: {"y": [y]}, lambda m, out, box: out["y"][0]),
    "an argument": Way(_into_box, lambda m, out, box: box[0]),
    "the module": Way(_onto_module, lambda m, out, box: m.kept),
    "a deque": Way(lambda m, y, box: collections.deque([y]), lambda m, out, box: out[0]),
    "a set": Way(lambda m, y, box: {y}, lambda m, out, box: next(iter(out))),
    "slots": Way(lambda m, y, box: Slotted(y), lambda m, out, box: out.value),
    "a closure": Way(lambda m, y, box: lambda: y, lambda m, out, box: out()),
    "a generator": Way(lambda m, y, box: (t for t in [y]), lambda m, out, box: next(out)),
    "deep lists": Way(_deep, _from_deep),
    "a view": Way(lambda m, y, box: (y * 2)[None], lambda m, out, box: out[0]),
    "a written view": Way(lambda m, y, box: (y * 2)[None], _written_view),
    "a NamedTuple": Way(
        lambda m, y, box: torch.return_types.max((y, y)), lambda m, out, box: out.values
    ),
}


class Giving(Block):
    """A block that passes its result in some way."""

    way = "a tensor"

    def forward(self, x: Tensor, box: list[Any] | None = None) -> Any:
        return WAYS[self.way].give(self, super().forward(x), box if box is not None else [])


class Taking(nn.Module):
    """Blocks, one after the other. run: "eager", or checkpointed ("reentrant", "non-reentrant")."""

    def __init__(self, way: str, run: str = "eager") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Giving(WIDTH) for _ in range(3))
        for block in self.blocks:
            block.way = way  # type: ignore[assignment]
        self.head = nn.Linear(WIDTH, 2)
        self.way, self.run = way, run

    def _block(self, block: nn.Module, x: Tensor) -> Tensor:
        box: list[Any] = []
        return WAYS[self.way].take(block, block(x, box), box)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.run == "eager":
                x = self._block(block, x)
            else:
                reentrant = self.run == "reentrant"
                x = checkpoint(self._block, block, x, use_reentrant=reentrant)
        return self.head(x)  # type: ignore[no-any-return]


def learn(model: nn.Module, x: Tensor) -> None:
    """A forward and a backward."""
    loss_of(model(x.requires_grad_())).backward()
