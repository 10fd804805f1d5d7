"""Models whose own attributes have the names of FSDP's."""

from __future__ import annotations

from torch import nn

from zshard import FSDP

NAMES = sorted({name for name in dir(FSDP) if not name.startswith("_")} - {*dir(nn.Module)})


def refuse(kind: type[nn.Module], *but: str) -> type[nn.Module]:
    """Give the class properties with all of FSDP's names that raise when they are read, except
    those that it has."""
    for name in NAMES:
        if not hasattr(kind, name) and name not in but:
            setattr(kind, name, property(_refusing(name)))
    return kind


def _refusing(name: str):
    def read(self: nn.Module) -> None:
        raise AssertionError(f"model.{name} was read: call FSDP.{name}(model)")

    return read
