"""Methods other than forward that need a unit's full parameters.

A method is wrapped once per class, and does what the two forward hooks do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from zshard.precision import cast_arguments
from zshard.units.open_forwards import call_between_hooks, call_guarded
from zshard.units.units import is_unit, state_of


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Treat a method of a sharded module like its forward: all-gather parameters around it.

    For methods such as `forward_features` or `encode`. Gradients are reduced as after a forward.
    Methods that call the modules, like transformers' `generate`, do not need it.

    Args:
        module: a module wrapped by FSDP; any other module is ignored.
        method_name: name of the method. It is replaced on the module's class, that is, for all
            modules of that class.

    Raises AttributeError if the class lacks the method.
    """
    if not is_unit(module):
        return
    original = getattr(type(module), method_name)
    if hasattr(original, "_zshard_original"):
        return

    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call_as_forward(self, functools.partial(original, self), args, kwargs)

    method._zshard_original = original  # type: ignore[attr-defined]
    setattr(type(module), method_name, method)


def call_as_forward(
    module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return function(*args, **kwargs), treated like the forward of `module`, which is a unit."""
    unit = state_of(module).unit
    if not unit.is_hooked:
        return function(*args, **kwargs)
    args, kwargs = cast_arguments(module, args, kwargs)
    return call_guarded(
        module, unit, call_between_hooks, (module, unit, function, args, kwargs), {}
    )
