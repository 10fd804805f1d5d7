"""`wire`: how gradients and parameters cross hosts in fewer bytes.

It is a property of units, which the core hands to the transport between hosts. This file has only
its names, and the cases where it is not available.
"""

from __future__ import annotations

from dataclasses import dataclass

from zshard import _core

CODES = {None: 0, "bf16": 1, "int8": 2}
"""By the names that Wire takes: their numbers in the core."""


@dataclass(frozen=True)
class Wire:
    """How numbers cross hosts, in fewer bytes: FSDP(model, wire=zshard.Wire(...)).

    Pass the same settings on all ranks. `wire="int8"` is short for
    `Wire(gradients="int8", parameters="int8")`.

    Args:
        gradients: "bf16": half the bytes of float32. "int8": about a quarter, in blocks of 256
            numbers that share a scale. What that rounds off one step's gradients goes into the next
            step's. None: exact.
        parameters: the same of parameters that are all-gathered. Forward and backward compute with
            the rounded values, equal on all ranks; the optimizer and checkpoints have the exact
            ones. None: exact.

    Raises ValueError for other names.
    """

    gradients: str | None = None
    parameters: str | None = None

    def __post_init__(self) -> None:
        for name in ("gradients", "parameters"):
            value = getattr(self, name)
            if not _is_code(value):
                raise ValueError(f"Wire: {name} must be 'bf16', 'int8' or None, got {value!r}")

    @property
    def codes(self) -> tuple[int, int]:
        """Return the arguments of Engine.set_codes."""
        return CODES[self.gradients], CODES[self.parameters]

    @staticmethod
    def of(given: str | Wire | None) -> Wire:
        """Parse FSDP()'s argument. Raises ValueError for an unknown name."""
        if not isinstance(given, Wire) and not _is_code(given):
            raise ValueError(f"wire must be 'bf16', 'int8', a zshard.Wire or None, got {given!r}")
        return given if isinstance(given, Wire) else Wire(given, given)

    def spelled(self) -> str:
        """Return it as a script would write it."""
        return repr(self.gradients if self.gradients == self.parameters else self)


def _is_code(value: object) -> bool:
    return value is None or (isinstance(value, str) and value in CODES)


_BETWEEN_HOSTS = {"c10d": "hosts", "c10d_gpu": "nccl"}
"""Transports without codes: the one that has them."""


def check_wire_over(comm: _core.Comm, wire: Wire) -> None:
    """Raise NotImplementedError, the same on all ranks, if the transport would not encode numbers
    between hosts."""
    if wire != Wire() and comm.transport in _BETWEEN_HOSTS:
        instead = _BETWEEN_HOSTS[comm.transport]
        raise NotImplementedError(
            f"wire={wire.spelled()} is not supported by transport='c10d': between hosts with the "
            f"same number of ranks each, pass transport='{instead}' (or 'auto'); else omit wire"
        )


def wire_words(comm: _core.Comm, wire: Wire, units: list[_core.Unit]) -> str:
    """Return summary()'s text about it; '' if there is none."""
    if wire == Wire():
        return ""
    if comm.per_host == 0:
        other = ", or with unequal numbers of ranks on hosts" if comm.transport == "nccl" else ""
        return f"wire={wire.spelled()} has no effect on one host{other}"
    words = []
    if wire.gradients is not None:
        words.append(f"gradients cross hosts as {wire.gradients}")
    if wire.parameters is not None:
        coded = any(unit.is_coded for unit in units)
        how = f"as {wire.parameters}" if coded else "as they are"
        words.append(f"parameters {how}" if words else f"parameters cross hosts {how}")
    return ", ".join(words)
