"""`wire`: how gradients and parameters cross hosts in fewer bytes.

It is a property of units, which the core hands to the transport between hosts. This file has only
its names, and the cases where it is not available.
"""

from __future__ import annotations

from dataclasses import dataclass

from zshard import _core
from zshard._errors import check_choice

CODES = ("bf16", None)


@dataclass(frozen=True)
class Wire:
    """Compresses numbers that are sent between hosts: FSDP(model, wire=zshard.Wire(...)).

    Pass the same settings on all ranks. `wire="bf16"` is short for
    `Wire(gradients="bf16", parameters="bf16")`.

    Args:
        gradients: "bf16": half the bytes of float32. What that rounds off one step's gradients goes
            into the next step's. None: exact.
        parameters: the same of parameters that are all-gathered. Forward and backward compute with
            the rounded values, equal on all ranks; the optimizer and checkpoints have the exact
            ones. None: exact.

    Raises ValueError for other names.
    """

    gradients: str | None = None
    parameters: str | None = None

    def __post_init__(self) -> None:
        check_choice("Wire: gradients", self.gradients, CODES)
        check_choice("Wire: parameters", self.parameters, CODES)

    @property
    def codes(self) -> tuple[bool, bool]:
        """Return the arguments of Engine.set_codes."""
        return self.gradients is not None, self.parameters is not None

    @staticmethod
    def of(argument: str | Wire | None) -> Wire:
        """Parse FSDP()'s argument. Raises ValueError for an unknown name."""
        if isinstance(argument, Wire):
            return argument
        check_choice("wire", argument, CODES)
        return Wire(argument, argument)

    def spelled(self) -> str:
        """Return it as a script would write it."""
        return repr(self.gradients if self.gradients == self.parameters else self)


def check_wire_over(comm: _core.Comm, wire: Wire) -> None:
    """Raise NotImplementedError, the same on all ranks, if the transport would not encode numbers
    between hosts."""
    instead = {"c10d": "hosts", "c10d_gpu": "nccl"}.get(comm.transport)
    if wire != Wire() and instead is not None:
        raise NotImplementedError(
            f"wire={wire.spelled()} is not supported by transport='c10d': omit wire, or pass "
            f"transport='{instead}' on hosts with the same number of ranks each"
        )


def wire_words(comm: _core.Comm, wire: Wire, units: list[_core.Unit]) -> str:
    """Return summary()'s text about it; '' if there is none."""
    if wire == Wire():
        return ""
    if comm.per_host == 0:
        return f"wire={wire.spelled()} has no effect on one host, or on hosts of unequal size"
    coded = wire.parameters if any(unit.is_coded for unit in units) else "they are"
    codes = {"gradients": wire.gradients, "parameters": wire.parameters and coded}
    return ", ".join(f"{name} cross hosts as {code}" for name, code in codes.items() if code)
