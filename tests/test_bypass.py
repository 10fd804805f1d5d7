"""auto_wrap_policy="auto" makes no unit of a module that is used without being called."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from unit_watch import uses_while_sharded

from zshard.wrap import UnitSpec, plan_units

Tensor = torch.Tensor


def names(units: list[UnitSpec]) -> list[str]:
    return [unit.name for unit in units]


class Pair(nn.Sequential):
    """Two layers, as a block."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Bypass(nn.Module):
    """Four equal blocks and two Linears, each big enough to be a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Pair() for _ in range(4)))
        self.side = nn.Linear(8, 8)
        self.extra = nn.ModuleDict({"side": nn.Linear(8, 8)})

    @property
    def first(self) -> nn.Module:
        return self.layers[0]

    def get_side(self) -> nn.Linear:
        return self.side

    def side_weight(self) -> Tensor:
        return self.side.weight


class ReadsChild(Bypass):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layers(x), self.side.weight)


class ReadsThroughName(Bypass):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        side, other = self.side, self.extra["side"]
        return F.linear(x, side.weight) + other(x)


class ReadsThroughMethod(Bypass):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layers(x), self.side_weight())


class ReadsThroughGetter(Bypass):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layers(x), self.get_side().weight)


class ReadsInSuper(ReadsChild):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class ReadsInClosure(Bypass):
    def forward(self, x: Tensor) -> Tensor:
        return (lambda y: F.linear(y, self.side.weight))(self.layers(x))


class ReadsDictEntry(Bypass):
    def forward(self, x: Tensor) -> Tensor:
        for _, side in self.extra.items():
            x = F.linear(x, side.weight)
        return self.side(self.layers(x))


class CallsForward(Bypass):
    def forward(self, x: Tensor) -> Tensor:
        return self.side.forward(self.layers(x))


class CallsInsideBlock(Bypass):
    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer[1](layer[0](x)) + number
        return self.side(x)


class CallsInsideFirst(Bypass):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first[0](x)
        for layer, _ in zip(self.layers[1:], range(9), strict=False):
            x = layer(x)
        return self.side(x)


class CheckpointsParts(Bypass):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer[0], x, use_reentrant=False)
        return checkpoint_sequential(self.layers[1], 2, self.side(x), use_reentrant=False)


class Careful(Bypass):
    """Looks at weights in ways that a sharded model allows."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.side.weight.dtype)
        if self.side.bias is not None and self.layers[0][0].weight.device == x.device:
            x = checkpoint(self.layers, x, use_reentrant=False)
        for layer in self.layers:
            x = layer(x)
        return self.side(x)


LAYERS = [f"layers.{k}" for k in range(4)]
BYPASSES: list[tuple[type[Bypass], set[str]]] = [
    (ReadsChild, {"side"}),
    (ReadsThroughName, {"side"}),
    (ReadsThroughMethod, {"side"}),
    (ReadsThroughGetter, {"side"}),
    (ReadsInSuper, {"side"}),
    (ReadsInClosure, {"side"}),
    (ReadsDictEntry, {"extra.side"}),
    (CallsForward, {"side"}),
    (CallsInsideBlock, set(LAYERS)),
    (CallsInsideFirst, {"layers.0"}),
    (CheckpointsParts, set(LAYERS)),
    (Careful, set()),
]


@pytest.mark.filterwarnings("ignore:auto_wrap_policy")
@pytest.mark.parametrize(("kind", "spared"), BYPASSES)
def test_modules_that_are_reached_through_are_no_units(
    kind: type[Bypass], spared: set[str]
) -> None:
    model = kind()
    found = set(names(plan_units(model)))
    assert not found & spared
    assert {"side", "extra.side", *LAYERS} - spared <= found
    assert uses_while_sharded(plan_units(model), torch.randn(2, 8)) == []
    if spared:  # the check above can fail: it does when those are units after all
        careless = plan_units(
            model, lambda module: any(module is model.get_submodule(name) for name in spared)
        )
        assert uses_while_sharded(careless, torch.randn(2, 8)) != []


def test_blocks_that_are_reached_through_are_reported() -> None:
    class Rescaled(Bypass):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x / (layer[0].weight.norm() * layer[-1].weight.norm()))
            return x

    model = Rescaled()
    with pytest.warns(UserWarning, match="makes no unit of Pair, because Rescaled uses its"):
        units = plan_units(model)
    assert "layers.0" not in names(units)
    assert uses_while_sharded(units, torch.randn(2, 8)) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert names(plan_units(model, {Pair})) == [*LAYERS, ""]


def test_a_replaced_forward_is_the_one_that_is_read() -> None:
    model = Bypass()

    def forward(self: Bypass, scale: float, x: Tensor) -> Tensor:
        return F.linear(self.layers(x), self.side.weight) * scale

    model.forward = functools.partial(forward, model, 2.0)  # type: ignore[method-assign]
    assert "side" not in names(plan_units(model))


def test_code_without_source_counts_as_well_behaved() -> None:
    scope: dict[str, Any] = {"nn": nn, "Pair": Pair}
    exec(
        "class Made(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = nn.ModuleList(Pair() for _ in range(4))\n"
        "    def forward(self, x):\n"
        "        for layer in self.layers: x = layer(x)\n"
        "        return x\n",
        scope,
    )
    assert names(plan_units(scope["Made"]())) == [*LAYERS, ""]
