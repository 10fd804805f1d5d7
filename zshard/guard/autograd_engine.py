"""Tell the core of each backward that begins.

torch.autograd.backward(), torch.autograd.grad() and torch.func all call one object,
so a subclass of it sees the roots of every backward that Python begins.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.variable import Variable

from zshard import _core
from zshard.guard import tracing


class AutogradEngine(torch._C._ImperativeEngine):
    """torch's engine. Before a backward, the core finds where it enters the units of models."""

    def run_backward(self, roots: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        """Run a backward from `roots`, tensors or GradientEdges."""
        if not tracing.now():  # of a graph without values, which is compiled and not run
            _core.before_backward(roots)
        return super().run_backward(roots, *args, **kwargs)


def install() -> None:
    """Have torch call our engine."""
    Variable._execution_engine = AutogradEngine()
