"""What zshard changes of torch.

The one idea: it is listed here, and nowhere else; each part knows how.
"""

from __future__ import annotations

from zshard import grad_scaler
from zshard._guard import collectives, foreign, slices
from zshard._optim import clip, hooks
from zshard._state_dict import lone_optimizer, optimizer
from zshard._wrap import late_parameters

__all__ = ["install"]


def install() -> None:
    """Change it. Idempotent."""
    slices.install()
    collectives.install()
    hooks.install()
    late_parameters.install()
    foreign.install()
    clip.install()
    optimizer.install()
    lone_optimizer.install()
    grad_scaler.install()
