"""Report the start of each backward to the core of autograd.

torch.autograd.backward(), torch.autograd.grad() and torch.func all call one object, so a subclass
of its class sees the roots of every backward that Python starts.

The compiler copies each parameter and its .grad into tensors without memory, and the copy refuses a
gradient of another shape or dtype than the parameter's. In forward, parameters are full and
gradients are shards, so the compiler sees no gradient (WholeParameter). All other readers, such as
other threads, see it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import _guards
from torch.autograd.variable import Variable

from zshard import _core

__all__ = ["install", "is_tracing"]


def is_tracing() -> bool:
    """Return whether torch is tracing for the compiler on this thread. The public is_compiling() is
    True on all threads."""
    return _guards.TracingContext.try_get() is not None


class AutogradEngine(torch._C._ImperativeEngine):
    """torch's engine, but before each backward the core finds where it enters the units of
    models."""

    def run_backward(self, roots: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        """Run a backward from `roots`, tensors or GradientEdges."""
        if not is_tracing():  # a traced graph has no values and does not run
            _core.before_backward(roots)
        return super().run_backward(roots, *args, **kwargs)


def install() -> None:
    """Make torch call zshard's engine."""
    Variable._execution_engine = AutogradEngine()
