"""DDP's dialect: its argument for the device, and the methods of its modules.

Scripts for DDP run unchanged but for the line that wraps the model. no_sync() and join() are in
`model/unit_methods.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from zshard.units.units import state_of, units_of


def one_device(device_id: Any, device_ids: Any) -> Any:
    """Return what `device_id` and DDP's spelling of it say. Raises ValueError if both are given, or
    the second is not one device."""
    if device_ids is None:
        return device_id
    if device_id is not None:
        raise ValueError("pass either device_id or device_ids, not both")
    if not isinstance(device_ids, list | tuple) or len(device_ids) != 1:
        raise ValueError(
            f"device_ids={device_ids!r}: expected a list of one GPU, that of this rank"
        )
    return device_ids[0]


_PREFIX = "module."


def names_without_module(model: nn.Module, state: Any) -> Any:
    """Return a state dict of DDP's, whose names all begin with "module.", under the model's own
    names; any other as it is."""
    names = list(state) if isinstance(state, Mapping) else []
    is_ddps = all(isinstance(name, str) and name.startswith(_PREFIX) for name in names)
    if not names or not is_ddps or "module" in model._modules:
        return state
    made = OrderedDict((name.removeprefix(_PREFIX), value) for name, value in state.items())
    facts = getattr(state, "_metadata", None)
    if facts is not None:  # by module: DDP itself is ""
        own = (
            (f"{name}.".removeprefix(_PREFIX)[:-1], each) for name, each in facts.items() if name
        )
        made._metadata = OrderedDict(own)  # type: ignore[attr-defined]
    return made


class DdpMethods(nn.Module):
    """The methods of DDP's modules."""

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward reduces gradients, as scripts for DDP set it instead of using no_sync():
        False is set_requires_gradient_sync(False)."""
        return bool(state_of(self).unit.sync)

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        for _, state in units_of(self):
            state.unit.sync = bool(value)

    def will_sync_module_buffers(self) -> bool:
        """Return whether forward broadcasts buffers from rank 0 (forward_sync_buffers=True)."""
        state = state_of(self)
        return (
            bool(state.sync_buffers)
            and state.comms.all.world > 1
            and any(True for _ in self.buffers())
        )

    def _set_static_graph(self) -> None:
        """Accepted for compatibility with DDP; no effect: graphs may change or not."""
