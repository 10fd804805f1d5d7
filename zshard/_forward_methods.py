"""Methods other than forward that are to find a unit's parameters whole.

The one idea: a method is wrapped once per class, and does what the two forward hooks do.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from zshard._units import is_unit, state_of
from zshard.precision import cast_arguments


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Has another method of a unit's module do what its forward does: gather the unit's parameters,
    and take care of their gradients. For `forward_features`, `encode` and the like; a method that
    calls the modules, as transformers' `generate` does, needs nothing.

    For all modules of that class. A module that FSDP has not wrapped is left alone. Raises
    AttributeError where there is no such method.
    """
    if not is_unit(module):
        return
    original = getattr(type(module), method_name)
    if hasattr(original, "_zshard_original"):
        return

    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        unit = state_of(self).unit
        if not unit.is_hooked:
            return original(self, *args, **kwargs)
        args, kwargs = cast_arguments(self, args, kwargs)
        unit.pre_forward(self, args)
        output = None
        try:
            output = original(self, *args, **kwargs)
        finally:
            unit.post_forward(self, args, output)
        return output

    method._zshard_original = original  # type: ignore[attr-defined]
    setattr(type(module), method_name, method)
