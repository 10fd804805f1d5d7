"""torch.distributed.checkpoint refuses state dicts of shards, of which it would save one rank's.

The shards of a parameter are plain tensors under one name on all ranks, which
dcp.save() takes for copies of each other. So it is told which tensors are shards, where it decides
what to write.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from zshard._errors import ShardError, stacklevel

__all__ = ["note_shards"]

_shards: Any = WeakIdKeyDictionary()
"""Tensors of state dicts that are shards."""


def note_shards(tensors: Iterable[Any]) -> None:
    """Have dcp.save() refuse these tensors of a state dict."""
    _install()
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            _shards[tensor] = None


def _install() -> None:
    from torch.distributed.checkpoint import default_planner, planner_helpers  # takes long

    if not hasattr(default_planner, "_create_write_items"):
        warnings.warn(
            "this torch decides elsewhere what dcp.save() writes, so it does not refuse shards, of "
            "which it would keep one rank's: call zshard.save()",
            stacklevel=stacklevel(),
        )
        return
    for module in (default_planner, planner_helpers):
        make = getattr(module, "_create_write_items", None)
        if make is not None and not hasattr(make, "__wrapped__"):
            module._create_write_items = _refusing(make)  # type: ignore[attr-defined]


def _refusing(make: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    @functools.wraps(make)
    def made(fqn: str, value: Any) -> Any:
        if isinstance(value, Tensor) and value in _shards:
            raise ShardError(
                f"dcp.save() was given this rank's shard of '{fqn}', and would drop those of the "
                "other ranks: call it with a state dict from outside "
                "FSDP.state_dict_type(model, 'SHARDED_STATE_DICT'), which has full tensors, or "
                "call zshard.save()"
            )
        return make(fqn, value)

    return made
