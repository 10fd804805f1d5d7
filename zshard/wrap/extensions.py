"""A registry of other libraries' requirements in a sharded model.

The core knows only torch. An integration (integrations/peft.py, say) derives a class from Extension
and registers an instance; the core asks each of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from zshard.ranks.agreement import Fact
from zshard.wrap.tree import ParamRef


class Extension:
    """An integration's additions to sharding; by default nothing."""

    def methods(self, original: type[nn.Module]) -> dict[str, Any]:
        """Return replacements for attributes of `original` on a unit's class, by name."""
        return {}

    def check(self, name: str, ref: ParamRef) -> None:
        """Raise TypeError or ValueError for a parameter that cannot be sharded."""

    def facts(self, name: str, param: Tensor, values: bool) -> Iterable[Fact]:
        """Return what ranks must agree on about a parameter; with `values`, also its values."""
        return ()

    def settle(self, ref: ParamRef) -> None:
        """Do to a parameter and its modules now what they would do in a forward."""

    def restore(self, model: nn.Module) -> None:
        """Undo that in a plain copy of a sharded model."""

    def keeps_dtype(self, ref: ParamRef) -> bool:
        """Return whether mixed precision must not cast a parameter."""
        return False

    def tensors(self, param: Tensor) -> Iterable[Tensor]:
        """Return tensors that belong to a parameter and are not sharded with it."""
        return ()

    def move(self, param: Tensor) -> None:
        """Move these tensors to the device of the parameter."""

    def finish(self, model: nn.Module) -> None:
        """Finish once the model is sharded."""


EXTENSIONS: list[Extension] = []
