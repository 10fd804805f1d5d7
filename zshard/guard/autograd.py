"""What zshard tells the core of autograd: each backward that begins.

torch.autograd.backward(), torch.autograd.grad() and torch.func all call one object,
so a subclass of it sees the roots of every backward that Python begins.

The compiler copies each parameter that it meets, together with its .grad, into tensors without
memory; the copy refuses a gradient of another shape or dtype than the parameter. In forward
parameters are whole and gradients are shards, so to the compiler they have none (WholeParameter of
slices.py): whoever else asks, in another thread or a moment later, sees the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import _guards
from torch.autograd.variable import Variable

from zshard import _core

__all__ = ["install", "is_tracing"]


def is_tracing() -> bool:
    """Return whether torch is tracing on this thread right now, to compile. The public
    is_compiling() is True on all threads."""
    return _guards.TracingContext.try_get() is not None


class AutogradEngine(torch._C._ImperativeEngine):
    """torch's engine. Before a backward, the core finds where it enters the units of models."""

    def run_backward(self, roots: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        """Run a backward from `roots`, tensors or GradientEdges."""
        if not is_tracing():  # of a graph without values, which is compiled and not run
            _core.before_backward(roots)
        return super().run_backward(roots, *args, **kwargs)


def install() -> None:
    """Have torch call our engine."""
    Variable._execution_engine = AutogradEngine()
