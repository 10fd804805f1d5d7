"""Optimizers that already have state when their parameters are sharded: of a snapshot, or of steps
of the plain model. From then on, each rank keeps its shard of that state.

What has the parameter's full shape is sharded as the parameter is, as when a state
dict is loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zshard.guard.slices import guard_like, plain
from zshard.optim.memory import zeros_side_by_side
from zshard.optim.sharded_state import SCALARS, params_of
from zshard.units.shards import Part, part_of

__all__ = ["shard_state_of"]


@torch.inference_mode(False)
@torch.no_grad()
def shard_state_of(optimizer: Optimizer) -> bool:
    """Shard the state that an optimizer has of sharded parameters; return whether it has any. Not
    collective: each rank takes its shard of its own state, which under DDP it would go on with."""
    held = [(param, part) for param in params_of(optimizer) if (part := part_of(param))]
    if not any(param in optimizer.state for param, _ in held):
        return False
    _shard(optimizer, held)
    return True


def _shard(optimizer: Optimizer, held: list[tuple[Tensor, Part]]) -> None:
    full: dict[Any, list[tuple[Tensor, Part]]] = {}
    for param, part in held:
        for key, value in optimizer.state.get(param, {}).items():
            if part.is_cut and _is_full(key, value, part):
                full.setdefault(key, []).append((param, part))
    for key, found in full.items():
        with plain():
            for param, value in _shards(optimizer, key, found):
                optimizer.state[param][key] = value


def _is_full(key: Any, value: Any, part: Part) -> bool:
    if not isinstance(value, Tensor) or tuple(value.shape) != part.shape:
        return False
    return value.dim() > 0 or key not in SCALARS


def _shards(
    optimizer: Optimizer, key: Any, found: list[tuple[Tensor, Part]]
) -> list[tuple[Tensor, Tensor]]:
    """The state of one name, adjacent in memory as the parameters are."""
    old = [(param, part.of(optimizer.state[param][key])) for param, part in found]
    alike = [param for param, value in old if value.dtype == param.dtype]
    places = dict(zip(map(id, alike), zeros_side_by_side(alike), strict=True))
    made = []
    for param, value in old:
        place = places.get(id(param))
        if place is None:  # a dtype of its own
            place = guard_like(torch.empty_like(value, device=param.device), param)
        made.append((param, place.copy_(value)))
    return made
