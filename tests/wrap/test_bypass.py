"""auto_wrap_policy="auto" makes no unit of a module that is used without being called."""

from __future__ import annotations

import ast
import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from unit_watch import uses_while_sharded

from zshard._wrap.source_code import _Bindings, bypassed_modules
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

    def first_only(self, x: Tensor) -> Tensor:
        return self[0](x)


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


def reads_child(self: Any, x: Tensor) -> Tensor:
    return F.linear(self.layers(x), self.side.weight)


def reads_through_names(self: Any, x: Tensor) -> Tensor:
    side, layers = self.side, self.layers
    return F.linear(layers(x), side.weight) + F.linear(x, (_ := self.extra["side"]).weight)


def reads_through_method(self: Any, x: Tensor) -> Tensor:
    return F.linear(self.layers(x), self.side_weight())


def reads_through_getter(self: Any, x: Tensor) -> Tensor:
    return F.linear(self.layers(x), self.get_side().weight)


def reads_through_getattr(self: Any, x: Tensor) -> Tensor:
    return F.linear(self.layers(x), getattr(self, "side").weight)  # noqa: B009


def reads_either(self: Any, x: Tensor) -> Tensor:
    chosen = self.side if len(x) else self.extra["side"]
    return F.linear(self.layers(x), chosen.weight)


def reads_in_closure(self: Any, x: Tensor) -> Tensor:
    return (lambda y: F.linear(y, self.side.weight))(self.layers(x))


def reads_dict_items(self: Any, x: Tensor) -> Tensor:
    for _, side in self.extra.items():
        x = F.linear(x, side.weight)
    return self.side(self.layers(x))


def reads_dict_values(self: Any, x: Tensor) -> Tensor:
    sides = [F.linear(x, side.weight) for side in self.extra.values()]
    return self.side(self.layers(sides[0]))


def calls_forward(self: Any, x: Tensor) -> Tensor:
    return self.side.forward(self.layers(x))


def calls_other_method(self: Any, x: Tensor) -> Tensor:
    return self.side(self.layers(self.layers[3].first_only(x)))


def calls_inside(self: Any, x: Tensor) -> Tensor:
    for number, layer in enumerate(self.layers):
        x = layer[1](layer[0](x)) + number
    return self.side(x)


def calls_inside_listed(self: Any, x: Tensor) -> Tensor:
    layers = list(self.layers)
    for layer in reversed(layers):
        x = layer[0](x)
    return self.side(x)


def calls_inside_one(self: Any, x: Tensor) -> Tensor:
    x = self.first[0](x)
    for layer, _ in zip(self.layers[1:], range(9), strict=False):
        x = layer(x)
    return self.side(x)


def calls_inside_some(self: Any, x: Tensor) -> Tensor:
    for _, layer in zip(range(4), self.layers, strict=False):
        x = layer[-1](x)
    return self.side(x)


def calls_slice(self: Any, x: Tensor) -> Tensor:
    return self.side(self.layers[:2](x))


def checkpoints_inside(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = checkpoint(layer[0], x, use_reentrant=False)
    return self.side(x)


def checkpoints_elements(self: Any, x: Tensor) -> Tensor:
    return self.side(checkpoint_sequential(self.layers[1], 2, self.layers(x), use_reentrant=False))


def is_careful(self: Any, x: Tensor) -> Tensor:
    """Looks at weights only in ways that a sharded model allows."""
    x = x.to(self.side.weight.dtype)
    if self.side.bias is not None and self.layers[0][0].weight.device == x.device:
        x = checkpoint(self.layers, x, use_reentrant=False)
    for layer in self.layers:
        x = layer(x)
    return self.side(x)


LAYERS = [f"layers.{k}" for k in range(4)]
BYPASSES: list[tuple[Callable[..., Tensor], set[str]]] = [
    (reads_child, {"side"}),
    (reads_through_names, {"side", "extra.side"}),
    (reads_through_method, {"side"}),
    (reads_through_getter, {"side"}),
    (reads_through_getattr, {"side"}),
    (reads_either, {"side", "extra.side"}),
    (reads_in_closure, {"side"}),
    (reads_dict_items, {"extra.side"}),
    (reads_dict_values, {"extra.side"}),
    (calls_forward, {"side"}),
    (calls_other_method, {"layers.3"}),
    (calls_inside, set(LAYERS)),
    (calls_inside_listed, set(LAYERS)),
    (calls_inside_one, {"layers.0"}),
    (calls_inside_some, set(LAYERS)),
    (calls_slice, {"layers"}),
    (checkpoints_inside, set(LAYERS)),
    (checkpoints_elements, {"layers.1"}),
    (is_careful, set()),
]


@pytest.mark.filterwarnings("ignore:auto_wrap_policy")
@pytest.mark.parametrize(("forward", "reached"), BYPASSES)
def test_modules_that_are_reached_through_are_no_units(
    forward: Callable[..., Tensor], reached: set[str]
) -> None:
    model = type("Model", (Bypass,), {"forward": forward})()
    bypassed = bypassed_modules(model.modules())
    candidates = {"side", "extra.side", *LAYERS}
    found = {name for name in candidates if id(model.get_submodule(name)) in bypassed}
    assert found == reached - {"layers"}
    assert ("layers" in reached) <= (id(model.layers) in bypassed)
    units = plan_units(model)
    assert not set(names(units)) & reached
    assert uses_while_sharded(units, torch.randn(2, 8)) == []
    if reached:  # if those were units after all, the line above would have failed
        wrong = {id(model.get_submodule(name)) for name in reached}
        careless = plan_units(model, lambda module: id(module) in wrong)
        assert uses_while_sharded(careless, torch.randn(2, 8)) != []


def test_an_inherited_forward_is_read_too() -> None:
    class Base(Bypass):
        forward = reads_child

    class Derived(Base):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    model = Derived()
    units = plan_units(model)
    assert "side" not in names(units)
    assert uses_while_sharded(units, torch.randn(2, 8)) == []


def test_a_traced_forward_is_read_too() -> None:
    traced = fx.symbolic_trace(type("Model", (Bypass,), {"forward": reads_child})())
    units = plan_units(traced)
    assert "side" not in names(units)
    assert len(units) > 1
    assert uses_while_sharded(units, torch.randn(2, 8)) == []


def test_blocks_that_are_reached_through_are_reported() -> None:
    class Rescaled(Bypass):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x / (layer[0].weight.norm() * layer[-1].weight.norm()))
            return x

    model = Rescaled()
    with pytest.warns(UserWarning, match="does not make Pair a unit, because Rescaled uses its"):
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


def test_what_wraps_a_forward_is_read_as_well_as_what_it_wraps() -> None:
    """As TRL does: the wrapper is named after what it wraps, and calls it at times."""

    def patched(model: nn.Module) -> nn.Module:
        original = model.forward

        @functools.wraps(type(model).forward)
        def forward(self: Any, *args: Any, fused: bool = False) -> Tensor:
            if not fused:
                return original(*args)
            side = self.get_side()
            return F.linear(*args, side.weight)

        model.forward = types.MethodType(forward, model)  # type: ignore[method-assign]
        return model

    class Indexing(Bypass):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x)

    model = patched(Indexing())
    found = bypassed_modules([model])
    assert {name for name, each in model.named_modules() if id(each) in found} == {"layers", "side"}
    outer = patched(patched(Indexing()))
    assert len(bypassed_modules([outer])) == 2


def test_a_name_that_is_bound_over_and_over_costs_little() -> None:
    lines = ["def f(self):", " w = self.side.weight", *(f" w = w.view{k}()" for k in range(50))]
    definition = ast.parse("\n".join(lines)).body[0]
    assert isinstance(definition, ast.FunctionDef)
    paths = _Bindings(definition, "self").paths(ast.Name("w"))
    assert ("side", "weight") in paths
    assert len(paths) < 200


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
