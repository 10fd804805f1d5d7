"""Methods other than forward that need a unit's full parameters.

The one idea: a method is wrapped once per class, and does what the two forward hooks do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from zshard import _core
from zshard._units.open_forwards import call_guarded
from zshard._units.units import is_unit, state_of
from zshard.precision import cast_arguments


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
        unit = state_of(self).unit
        if not unit.is_hooked:
            return original(self, *args, **kwargs)
        args, kwargs = cast_arguments(self, args, kwargs)
        return call_guarded(self, unit, _call, (unit, original, self, args, kwargs), {})

    method._zshard_original = original  # type: ignore[attr-defined]
    setattr(type(module), method_name, method)


def _call(
    unit: _core.Unit,
    original: Callable[..., Any],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    unit.pre_forward(module, args)
    output = original(module, *args, **kwargs)
    unit.post_forward(module, args, output)
    return output
