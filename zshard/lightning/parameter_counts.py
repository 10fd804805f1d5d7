"""Lightning's table of a model, with full parameters and the names of the user's classes."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from zshard.guard.whole_values import full_numel
from zshard.lightning.sharding import trainer_package
from zshard.units.units import is_unit

__all__ = ["count_full_parameters"]

_tables: Any = importlib.import_module(
    f"{trainer_package.__name__}.utilities.model_summary.model_summary"
)


def count_full_parameters() -> None:
    """Have Lightning's tables, and its summarize(), count full parameters. Idempotent."""
    layer, table = _tables.LayerSummary, _tables.ModelSummary
    layer.num_parameters = property(lambda self: _count(self._module.parameters()))
    layer.layer_type = property(_layer_type)
    table.total_parameters = property(lambda self: _count(self._model.parameters()))
    table.trainable_parameters = property(
        lambda self: _count(p for p in self._model.parameters() if p.requires_grad)
    )


def _count(params: Iterable[nn.Parameter]) -> int:
    return sum(full_numel(p) for p in params if not isinstance(p, UninitializedParameter))


def _layer_type(self: Any) -> str:
    """The name of the class that the user wrote."""
    kind = type(self._module)
    return (kind.__bases__[1] if is_unit(self._module) else kind).__name__
