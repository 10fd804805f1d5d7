"""Tensors on the meta device for which sharding has found no initialization.

The one idea: scripts for FSDP2 and DeepSpeed initialize or load after sharding, so that is no error
yet. It is one in the unit's first forward, if a tensor still has the mark that it was filled with.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from zshard._guard.slices import to_local
from zshard._units.units import known_hooks, state_of
from zshard._wrap.meta import has_mark

__all__ = ["check_in_forward"]


def check_in_forward(module: nn.Module, left_out: list[tuple[nn.Module, str, str]]) -> None:
    """Have the first forward of a unit's module raise RuntimeError for a tensor without values.

    left_out: as (module, attribute, dotted name).
    """
    if not left_out:
        return
    rest = [(weakref.ref(owner), attribute, name) for owner, attribute, name in left_out]

    def check(_: nn.Module, __: Any) -> None:
        for reference, attribute, name in rest:
            tensor = getattr(reference(), attribute, None)
            if isinstance(tensor, Tensor) and _is_unset(tensor):
                raise RuntimeError(
                    f"{name!r} was on the meta device, and nothing has initialized it: initialize "
                    "it after it is sharded (nn.init, reset_parameters()) or load a state dict, on "
                    "all ranks, before the first forward"
                )
        handle.remove()

    handle = module.register_forward_pre_hook(check, prepend=True)
    state_of(module).hooks += known_hooks(module, [handle])


@torch.no_grad()
def _is_unset(tensor: Tensor) -> bool:
    return tensor.is_meta or has_mark(to_local(tensor.detach()))
