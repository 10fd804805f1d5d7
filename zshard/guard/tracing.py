"""Whether torch's compiler is tracing on this thread.

The compiler copies each parameter that it meets, together with its .grad, into
tensors without memory; the copy refuses a gradient of another shape or dtype than the parameter. In
forward parameters are whole and gradients are shards, so to the compiler they have none
(WholeParameter of slices.py). Nothing is put aside for that, so nothing has to be put back: whoever
else asks, in another thread or a moment later, sees the gradient.
"""

from __future__ import annotations

from torch import _guards

__all__ = ["install", "now"]

_knows = False


def now() -> bool:
    """Whether torch is tracing on this thread right now, to compile."""
    return _knows and _guards.TracingContext.try_get() is not None


def install() -> None:
    """From now on ask torch. Idempotent."""
    global _knows
    _knows = True
