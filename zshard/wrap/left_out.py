"""Tensors on the meta device for which sharding has found no initialization.

Scripts for FSDP2 and DeepSpeed initialize or load after sharding, so that is no error
yet. It is one in the unit's first forward, if a tensor still has the mark that it was filled with.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from zshard.guard.slices import to_local
from zshard.units.units import known_hooks, state_of
from zshard.wrap.meta import has_mark

__all__ = ["check_in_forward"]


def check_in_forward(module: nn.Module, left_out: list[tuple[nn.Module, str, str]]) -> None:
    """Have the first forward of a unit's module raise RuntimeError for a tensor without values.

    left_out: as (module, attribute, dotted name).
    """
    if not left_out:
        return
    rest = [(weakref.ref(owner), attribute, name) for owner, attribute, name in left_out]

    def check(model: nn.Module, __: Any) -> None:
        unset = (i for i, (owner, attribute, _) in enumerate(rest) if _is_unset(owner(), attribute))
        first = next(unset, len(rest))
        if torch.is_grad_enabled():  # all ranks run it, and some may have no elements of a tensor
            all_first = state_of(model).comms.all.exchange(first.to_bytes(4, "big"))
            first = min(int.from_bytes(each, "big") for each in all_first)
        if first < len(rest):
            raise RuntimeError(
                f"{rest[first][2]!r} was on the meta device, and nothing has initialized it: "
                "initialize it after it is sharded (nn.init, reset_parameters()) or load a state "
                "dict, on all ranks, before the first forward"
            )
        handle.remove()

    handle = module.register_forward_pre_hook(check, prepend=True)
    state_of(module).hooks += known_hooks(module, [handle])


@torch.no_grad()
def _is_unset(owner: nn.Module | None, attribute: str) -> bool:
    tensor = getattr(owner, attribute, None)
    if not isinstance(tensor, Tensor):
        return False
    return tensor.is_meta or has_mark(to_local(tensor.detach()))
