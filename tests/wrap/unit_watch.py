"""Replaces sharding where only the choice of units is tested.

A parameter of a unit may be used only while the unit's module is being called. This records every
operator that gets one at another time; with real sharding each would be an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zshard.wrap import UnitSpec


class _Watch(TorchDispatchMode):
    def __init__(self, units: list[UnitSpec]) -> None:
        super().__init__()
        self.calls = [0] * len(units)
        self.owner = {id(ref.param): n for n, unit in enumerate(units) for ref in unit.params}
        self.names = {
            id(ref.param): f"{unit.name}: {ref.name}" for unit in units for ref in unit.params
        }
        self.violations: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in tree_leaves((args, kwargs)):
            unit = self.owner.get(id(value))
            if unit is not None and not self.calls[unit]:
                self.violations[self.names[id(value)]] = None
        return func(*args, **kwargs)


@contextlib.contextmanager
def _counted_calls(units: list[UnitSpec], calls: list[int]) -> Iterator[None]:
    def count(number: int, step: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            calls[number] += step

        return hook

    with contextlib.ExitStack() as handles:
        for number, unit in enumerate(units):
            before = unit.module.register_forward_pre_hook(count(number, 1), prepend=True)
            after = unit.module.register_forward_hook(count(number, -1), always_call=True)
            handles.callback(before.remove)
            handles.callback(after.remove)
        yield


def uses_while_sharded(units: list[UnitSpec], *inputs: Any, **kwargs: Any) -> list[str]:
    """Run the root's forward; return 'unit: parameter' for each use that a sharded model would have
    missed. `units` ends with the root, as `plan_units` returns them."""
    watch = _Watch(units)
    with _counted_calls(units, watch.calls), torch.no_grad(), watch:
        units[-1].module(*inputs, **kwargs)
    return list(watch.violations)
