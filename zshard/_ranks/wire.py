"""`wire`: how gradients cross hosts, in fewer bytes than they have.

The one idea: it is a property of units, which the core hands to the transport between hosts; all
that is here is its names, and where it cannot be had.
"""

from __future__ import annotations

from zshard import _core
from zshard._ranks.devices import CPU

CODES = {None: 0, "bf16": 1, "int8": 2}
"""By the names that FSDP(wire=...) takes: their numbers in the core."""


def check_wire(wire: str | None, device: str) -> str | None:
    """Return the argument. Raises ValueError for an unknown name, NotImplementedError for a model
    on a GPU."""
    if wire is not None and not (isinstance(wire, str) and wire in CODES):
        raise ValueError(f"wire must be 'bf16', 'int8' or None, got {wire!r}")
    if wire is not None and device != CPU:
        raise NotImplementedError(
            f"wire={wire!r} is not supported for a model on a GPU ({device}): omit wire, or reduce "
            "gradients in bfloat16 with mixed_precision=zshard.MixedPrecision(reduce_dtype="
            "torch.bfloat16)"
        )
    return wire


def check_wire_over(comm: _core.Comm, wire: str | None) -> None:
    """Raise NotImplementedError if the transport would leave gradients as they are between hosts:
    the same on all ranks."""
    if wire is not None and comm.transport == "c10d":
        raise NotImplementedError(
            f"wire={wire!r} is not supported by transport='c10d': between hosts with the same "
            "number of ranks each, pass transport='hosts' (or 'auto'); else omit wire"
        )


def wire_words(comm: _core.Comm, wire: str | None) -> str:
    """Return what summary() says of it; '' if there is nothing to say."""
    if wire is None:
        return ""
    if comm.transport == "hosts":
        return f"gradients cross hosts as {wire}"
    return f"wire={wire!r} has no effect on one host"
