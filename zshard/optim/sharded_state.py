"""Which state of an optimizer is sharded as its parameters are.

Shapes tell. What has the shape of a parameter's shard is a shard of something that
has the parameter's shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from zshard.ranks.agreement import Fact
from zshard.units.shards import Part, part_of

__all__ = ["SCALARS", "HeldState", "fact_of", "held_by", "held_in", "params_of", "scalar_keys"]

SCALARS = frozenset(("step", "eta", "mu", "mu_product"))
"""What torch's optimizers keep as one number per parameter. Used only if shapes do not tell: for
parameters that have no dimensions themselves."""


def params_of(optimizer: Optimizer) -> Iterable[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def scalar_keys(states: Iterable[tuple[tuple[int, ...], Mapping[Any, Any]]]) -> set[Any]:
    """The names of what an optimizer keeps as one number for each parameter, from the shape and the
    state of its parameters. They tell what a 0-dimensional tensor of a 0-dimensional one is."""
    found: set[Any] = set(SCALARS)
    for shape, entries in states:
        for key, value in entries.items():
            if shape != () and isinstance(value, Tensor) and value.dim() == 0:
                found.add(key)
    return found


@dataclass(frozen=True)
class HeldState:
    """A sharded parameter with its state on this rank: (name, value, is it sharded), sorted."""

    param: Tensor
    part: Part
    entries: list[tuple[Any, Any, bool]]

    @property
    def nested(self) -> str | None:
        """The first entry that has sharded tensors within a list or dict; None if none has."""
        for key, value, _ in self.entries:
            leaves = [] if isinstance(value, Tensor) else tree_leaves(value)
            if self.part.shape != () and any(_is_cut(leaf, self.part) for leaf in leaves):
                return f"'{key}' (a {type(value).__name__})"
        return None


def held_by(optimizer: Optimizer) -> list[HeldState]:
    """Return all sharded parameters of the optimizer in its order, also those without state."""
    return held_in(params_of(optimizer), optimizer.state)


def _now(entries: Any) -> Any:
    """A parameter's state; a copy, since the optimizer's thread may be making it."""
    return dict(entries) if type(entries) is dict else entries


def held_in(params: Iterable[Tensor], state: Mapping[Any, Any]) -> list[HeldState]:
    """The same of parameters and of an optimizer's state."""
    cut = [(param, part) for param in params if (part := part_of(param))]
    states = [(param, part, _now(state.get(param, {}))) for param, part in cut if part.is_cut]
    scalars = scalar_keys((part.shape, entries) for _, part, entries in states)
    held = []
    for param, part, entries in states:
        rows = [
            (
                key,
                entries[key],
                _is_cut(entries[key], part) and (part.shape != () or key not in scalars),
            )
            for key in sorted(entries, key=str)
        ]
        held.append(HeldState(param, part, rows))
    return held


def _is_cut(value: Any, part: Part) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == part.local_shape


def fact_of(each: HeldState) -> Fact:
    told = [f"{key} {_described(value, is_cut)}" for key, value, is_cut in each.entries]
    about = f"the state of '{each.part.name}' (shape {each.part.shape})"
    return about, ", ".join(told) or "none"


def _described(value: Any, is_cut: bool) -> str:
    if not isinstance(value, Tensor):
        return f"({type(value).__name__})"
    return f"({value.dtype}{', sharded' if is_cut else f', shape {tuple(value.shape)}'})"
