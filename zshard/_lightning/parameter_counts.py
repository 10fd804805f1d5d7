"""Lightning's table of a model, with full parameters and the names of the user's classes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from zshard._guard.whole_values import full_numel
from zshard._lightning.sharding import trainer_package
from zshard._units.units import is_unit

__all__ = ["summary_of"]

_tables: Any = importlib.import_module(
    f"{trainer_package.__name__}.utilities.model_summary.model_summary"
)


class _FullLayer(_tables.LayerSummary):  # type: ignore[misc]
    @property
    def layer_type(self) -> str:
        """The name of the class that the user wrote."""
        kind = type(self._module)
        return (kind.__bases__[1] if is_unit(self._module) else kind).__name__

    @property
    def num_parameters(self) -> int:
        return sum(map(full_numel, self._module.parameters()))


class _FullSummary(_tables.ModelSummary):  # type: ignore[misc]
    """Lightning's table of a model, which counts full parameters."""

    def summarize(self) -> dict[str, Any]:
        layers: dict[str, Any] = super().summarize()
        for layer in layers.values():
            layer.__class__ = _FullLayer
        return layers

    @property
    def total_parameters(self) -> int:
        return sum(map(full_numel, self._model.parameters()))

    @property
    def trainable_parameters(self) -> int:
        return sum(full_numel(p) for p in self._model.parameters() if p.requires_grad)


def summary_of(callback: Any) -> Callable[[Any, nn.Module], Any]:
    return lambda _, module: _FullSummary(module, max_depth=callback._max_depth)
